"""Products by text of whole arrays on a mesh: values and gradients are one device's, and nothing moves."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trellis as tr
from trellis.inspect import ledger
from trellis.notation import NotationError

MESH = tr.make_mesh(x=2, y=2, z=2)
SIZES = {"a": 8, "b": 16, "c": 8, "d": 8}


def numbers(seed, names):
    return np.random.default_rng(seed).normal(size=[SIZES[name] for name in names]).astype(np.float32)


def text_of(names, share, *states):
    return " ".join([*("/".join((name, *share.get(name, ()))) for name in names), *states])


@st.composite
def products(draw):
    """The names of factors and result, where each lies, and copies of some."""
    count = draw(st.sampled_from([1, 2, 2, 2, 3]))
    chosen = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)
    factors = ["".join(draw(chosen)) for _ in range(count)]
    known = sorted(set("".join(factors)))
    result = "".join(draw(st.lists(st.sampled_from(known), max_size=3, unique=True)))
    share = collections.defaultdict(tuple)
    for axis in draw(st.lists(st.sampled_from("xyz"), max_size=3, unique=True)):
        share[draw(st.sampled_from(known))] += (axis,)
    sliced = {axis for axes in share.values() for axis in axes}
    texts = []
    for names in factors:
        free = sorted(sliced - {axis for name in names for axis in share[name]})
        copied = draw(st.lists(st.sampled_from(free), unique=True)) if free else []
        texts.append(text_of(names, share, *(f"~{axis}" for axis in copied)))
    pending = sorted(axis for name in known if name not in result for axis in share[name])
    return factors, texts, result, text_of(result, share, *(f"+{axis}" for axis in pending)), text_of(result, share)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(products())
def test_it_is_one_devices(product):
    factors, texts, result, made, settled = product
    arrays = [numbers(i, names) for i, names in enumerate(factors)]
    weights = numbers(9, result)

    def whole(*arrays):
        return jnp.einsum(f"{','.join(factors)}->{result}", *arrays)

    def sliced(*arrays):
        placed = [tr.reshard(f"{' '.join(n)} -> {t}", a) for n, t, a in zip(factors, texts, arrays, strict=True)]
        out = tr.einsum(f"{', '.join(texts)} -> {made}", *placed)
        return tr.reshard(f"{made} -> {settled}", out) if "+" in made else out

    def gradients(function):
        def total(*arrays):
            out = function(*arrays)
            return (out * weights).sum(), out

        return jax.grad(total, tuple(range(len(arrays))), has_aux=True)

    with jax.set_mesh(MESH):
        try:
            both = jax.jit(lambda *arrays: (gradients(sliced)(*arrays), gradients(whole)(*arrays)))
            (found, out), (wanted, wanted_out) = both(*arrays)
        except NotationError as error:  # what devices cannot do alone
            assert "in einsum(" in str(error)
            return
    np.testing.assert_allclose(out, wanted_out, rtol=1e-4, atol=1e-3)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("a/x, c b, d/z -> c b +x +z", 64.0),  # JAX: 256
        ("a/x c, b -> b +x", 64.0),
        ("c ~x, a/x c ~y, b/y c a/x -> b/y a/x", 8.0),
        ("a/x -> +x", 8.0),
    ],
)
def test_nothing_moves(text, total):
    with jax.set_mesh(MESH):
        left, _, right = text.partition(" -> ")
        arrays = []
        for part in left.split(", "):
            names = [word.split("/")[0] for word in part.split() if word[0] not in "+~"]
            arrays.append(tr.reshard(f"{' '.join(names)} -> {part}", np.ones([SIZES[n] for n in names], np.float32)))
        assert not ledger(lambda *a: tr.einsum(text, *a), *arrays).rows
        made = tr.einsum(text, *arrays)
        settled = " ".join(word for word in right.split() if word[0] != "+")
        made = tr.reshard(f"{right} -> {settled}", made) if "+" in right else made
        np.testing.assert_array_equal(made, total)


def test_under_vmap_it_is_told():
    with jax.set_mesh(MESH):
        a, b = tr.reshard("k a -> k a/x", np.ones((3, 8), np.float32)), np.ones((3, 16), np.float32)
        with pytest.raises(NotationError, match="JAX cannot map over .* in `einsum.'a/x, b -> b .x'.`: settle it"):
            jax.vmap(lambda a, b: tr.einsum("a/x, b -> b +x", a, b))(a, b)


def test_what_jax_makes_of_three_factors():
    """Why they are each device's own products here. When this fails, JAX has learned it: take it out of the docs."""
    spec = jax.P(None, None, unreduced={"x", "z"})
    with jax.set_mesh(MESH):
        a, d = (jax.device_put(np.ones(8, np.float32), jax.NamedSharding(MESH, jax.P(axis))) for axis in "xz")
        b = jax.device_put(np.ones((8, 16), np.float32), jax.NamedSharding(MESH, jax.P()))
        made = jax.jit(lambda *a: jnp.einsum("a,cb,d->cb", *a, out_sharding=spec))(a, b, d)
        assert jax.jit(lambda r: jax.reshard(r, jax.P()))(made)[0, 0] == 256
