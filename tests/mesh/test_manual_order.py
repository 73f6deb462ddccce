"""In which order JAX's own collectives leave the parts of a dimension."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import trellis as tr
from tests.mesh.told import told
from trellis import f32
from trellis.notation import TypeMismatch


@pytest.fixture(scope="module", autouse=True)
def mesh():
    with jax.set_mesh(mesh := tr.make_mesh(x=2, y=4)):
        yield mesh


A = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)


def program(fn, argument, result):
    def of_one(a):
        return fn(a)

    of_one.__annotations__, of_one.__qualname__ = {"a": f32[argument], "return": f32[result]}, "program"
    return tr.shard_map(of_one)


def gather(a, over, axis=0, *, tiled=True):
    return lax.all_gather(a, over, axis=axis, tiled=tiled, to="invarying")


def scatter(a, over, axis=0):
    differing = a + 0 * lax.axis_index(over).astype(a.dtype)  # a sum of what is the same on all devices is refused
    return lax.psum_scatter(differing, over, scatter_dimension=axis, tiled=True)


def exchange(a, over, split=1, joined=0):
    return lax.all_to_all(a, over, split, joined, tiled=True)


def swapped(a):
    return lax.ppermute(a, ("x", "y"), [(i, i % 2 * 4 + i // 2) for i in range(8)])


IN_ORDER = {
    "at once": ("a/x/y b", "a b", lambda a: gather(a, ("x", "y"))),
    "the last axis first": ("a/x/y b", "a b", lambda a: gather(jnp.tanh(gather(a, "y")), "x")),
    "one axis": ("a/x/y b", "a/x b", lambda a: gather(a, "y")),
    "untiled": ("a/x/y b", "a b", lambda a: gather(a, ("x", "y"), tiled=False).reshape(16, 8)),
    "untiled, one axis": ("a/x/y b", "a/x b", lambda a: gather(a, "y", tiled=False).reshape(8, 8)),
    "untiled, the other dimension": (
        "a b/x/y",
        "a b",
        lambda a: gather(a, ("x", "y"), tiled=False).transpose(1, 0, 2).reshape(16, 8),
    ),
    "scattered": ("a b", "a/y/x b", lambda a: scatter(_copies(a), ("y", "x")) / 8),
    "scattered in turn": ("a b", "a/y/x b", lambda a: scatter(scatter(_copies(a), "y"), "x") / 8),
    "in two dimensions": ("a b", "a/x b/y", lambda a: scatter(scatter(_copies(a), "y", 1), "x") / 8),
    "exchanged": ("a/x/y b", "a b/x/y", lambda a: exchange(a, ("x", "y"))),
    "exchanged in turn": ("a/x/y b", "a b/y/x", lambda a: exchange(exchange(a, "y"), "x")),
    "there and back": ("a/x/y b", "a/x/y b", lambda a: exchange(exchange(a, "x"), "x", 0, 1)),
    "permuted": ("a/x/y b", "a/y/x b", swapped),
    "untangled by hand": (
        "a/x/y b",
        "a b",
        lambda a: gather(a, ("y", "x")).reshape(4, 2, 2, 8).transpose(1, 0, 2, 3).reshape(16, 8),
    ),
    "looked up by hand": (
        "a/x/y b",
        "a b",
        lambda a: gather(a, ("y", "x"))[np.arange(16).reshape(4, 2, 2).transpose(1, 0, 2).reshape(-1)],
    ),
}


def _copies(a):
    """What all devices hold, as something that differs between them."""
    return lax.pcast(a, ("x", "y"), to="varying")


@pytest.mark.parametrize("way", IN_ORDER)
def test_what_stands_in_order_is_right(way):
    argument, result, fn = IN_ORDER[way]
    expected = np.tanh(A) if "last" in way else A
    np.testing.assert_allclose(program(fn, argument, result)(A), expected, rtol=1e-6)


OUT_OF_ORDER = {
    "at once": ("a/x/y b", "a b", lambda a: gather(a, ("y", "x")), "y/x"),
    "the first axis first": ("a/x/y b", "a b", lambda a: gather(jnp.tanh(gather(a, "x")), "y"), "y/x"),
    "one axis": ("a/x/y b", "a/y b", lambda a: gather(a, "x"), "x"),
    "untiled": ("a/x/y b", "a b", lambda a: gather(a, ("y", "x"), tiled=False).reshape(16, 8), "y/x"),
    "untiled, one axis": ("a/x/y b", "a/y b", lambda a: gather(a, "x", tiled=False).reshape(4, 8), "x"),
    "in a loop": (
        "a/x/y b",
        "a b",
        lambda a: lax.scan(lambda c, _: (c + gather(a, ("y", "x")), None), jnp.zeros((16, 8)), length=2)[0],
        "y/x",
    ),
    "exchanged": ("a/x/y b", "a/y b/x", lambda a: exchange(a, "x"), "x"),
}


@pytest.mark.parametrize("way", OUT_OF_ORDER)
def test_what_stands_out_of_order_is_no_slice(way):
    argument, result, fn, over = OUT_OF_ORDER[way]
    with pytest.raises(TypeMismatch) as caught:
        program(fn, argument, result)(A)
    assert told(caught) == (
        f"a result must match its annotation, got a slice '{result}' for f32[{result}] ('a' was sliced over 'x/y' and "
        f"gathered over '{over}', so its parts are not in their order), in result of `program`: gather it over the "
        "last of its mesh axes first, or over ('x', 'y') at once, or correct the annotation"
    )


@pytest.mark.parametrize(
    ("fn", "argument", "held", "said"),
    [
        (lambda a: scatter(_copies(a), ("y", "x")), "a b", "a/y/x b", "a/x/y b"),
        (lambda a: scatter(scatter(_copies(a), "y"), "x"), "a b", "a/y/x b", "a/x/y b"),
        (lambda a: exchange(exchange(a, "y"), "x"), "a/x/y b", "a b/y/x", "a b/x/y"),
        (swapped, "a/x/y b", "a/y/x b", "a/x/y b"),
    ],
)
def test_slices_in_another_order_than_the_texts(fn, argument, held, said):
    with pytest.raises(TypeMismatch) as caught:
        program(fn, argument, said)(A)
    assert told(caught) == (
        f"a result must match its annotation, got a slice '{held}' for f32[{said}], in result of `program`: reshard "
        "it, or correct the annotation"
    )
    with pytest.raises(TypeMismatch, match=f"got a slice '{held}' for '{said}'"):
        program(lambda a: tr.all_gather(f"{said} -> a b", fn(a)), argument, "a b")(A)


@tr.shard_map
def layers(h: f32["n/x/y a"], ws: f32["layers a/x/y b"]) -> f32["n/x/y b"]:
    """A weight that is gathered in each turn of a loop, before its product."""
    return lax.scan(lambda h, w: (jnp.tanh(h @ lax.all_gather(w, ORDER, tiled=True)), None), h, ws)[0]


ORDER: tuple[str, ...] = ("x", "y")


@pytest.mark.slow
def test_what_was_gathered_out_of_order_meets_nothing_in_order(monkeypatch):
    h, ws = A @ W.T / 4, np.stack([W @ W.T / 16] * 2)
    plain = lambda h, ws: jnp.tanh(jnp.tanh(h @ ws[0]) @ ws[1])
    loss = lambda fn: jax.jit(jax.grad(lambda *given: (fn(*given) ** 2).sum(), argnums=(0, 1)))
    for found, expected in zip(loss(layers)(h, ws), loss(plain)(h, ws)):
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)
    monkeypatch.setattr("tests.mesh.test_manual_order.ORDER", ("y", "x"))
    with pytest.raises(TypeMismatch) as caught:
        layers(h, ws)
    assert told(caught, by_line=True) == (
        "parts of a dimension that are combined must stand in one order, got one sliced over 'x/y' and gathered over "
        "'y/x' and one in another order, in `layers`: gather it over the last of its mesh axes first, or over ('x', "
        "'y') at once"
    )


def test_positions_that_are_given_count_in_the_whole_array():
    @tr.shard_map
    def row(a: f32["a/x/y b"], i: tr.i32[""]) -> f32["b"]:
        return gather(a, ("y", "x"))[i]

    with pytest.raises(TypeMismatch) as caught:
        row(A, jnp.int32(3))
    assert told(caught, by_line=True) == (
        "positions must be looked up in a dimension whose parts stand in their order, got one sliced over 'x/y' and "
        "gathered over 'y/x', in `row`: gather it over the last of its mesh axes first, or over ('x', 'y') at once"
    )


@pytest.mark.slow
def test_positions_that_are_found_count_in_the_whole_array():
    for find in (jnp.argmax, jnp.argmin):
        at = lambda a, find=find: find(gather(a, ("y", "x")), axis=0).astype(jnp.float32)
        with pytest.raises(TypeMismatch, match="positions must be looked up in a dimension whose parts stand in their"):
            program(at, "a/x/y b", "b")(A)
        along = lambda a, find=find: find(gather(a, ("y", "x")), axis=1).sum().astype(jnp.float32)
        assert float(program(along, "a/x/y b", "")(A)) == float(find(A, axis=1).sum())
        ordered = lambda a, find=find: find(gather(a, ("x", "y")), axis=0).astype(jnp.float32)
        np.testing.assert_array_equal(program(ordered, "a/x/y b", "b")(A), find(A, axis=0))


UNORDERED = {
    "a sum": (lambda a: gather(a, ("y", "x")).sum(0), lambda a: a.sum(0)),
    "a largest": (lambda a: gather(a, ("y", "x")).max(0), lambda a: a.max(0)),
    "sorted": (lambda a: jnp.sort(gather(a, ("y", "x")), 0)[3], lambda a: jnp.sort(a, 0)[3]),
    "a product with itself": (
        lambda a: (lambda g: (g.T @ jnp.tanh(g))[0])(gather(a, ("y", "x"))),
        lambda a: (a.T @ jnp.tanh(a))[0],
    ),
    "a norm and its gradient": (
        lambda a: jax.grad(lambda a: (gather(a, ("y", "x")) ** 2).sum())(a).max(0),
        None,
    ),
}


@pytest.mark.parametrize("way", UNORDERED)
def test_an_order_that_does_not_matter_may_be_any(way):
    fn, expected = UNORDERED[way]
    if expected is None:
        jax.eval_shape(program(lambda a: lax.pmax(fn(a), ("x", "y")), "a/x/y b", "b"), A)
        return
    np.testing.assert_allclose(program(fn, "a/x/y b", "b")(A), expected(A), rtol=1e-5, atol=1e-5)
