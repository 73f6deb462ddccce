"""The one verb in explicit and auto mode: values, gradients, what the compiler makes of it, errors."""

import math
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import trellis as tr
from trellis.inspect import ledger
from trellis.mesh.reshard import ReshardError
from trellis.notation import Dim, NotationError, Shape
from trellis.notation.state import state_of

MESH = tr.make_mesh(data=4, model=2)


def put(shape, spec, dtype=jnp.float32):
    """Each element encodes its position."""
    return jax.device_put(jnp.arange(math.prod(shape), dtype=dtype).reshape(shape), jax.NamedSharding(MESH, spec))


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(MESH):
        yield


TABLE = [
    ("a/data b -> a b", "all-gather", []),
    ("a/data b -> a b ~data", "all-gather", ["reduce-scatter"]),
    ("a/data b -> a b/data", "all-to-all", ["all-to-all"]),
    ("a b -> a/data b", None, ["all-gather"]),
    ("a b -> a b ~data", None, ["all-reduce"]),
    ("a/data b/model -> a b/model ~data", "all-gather", ["reduce-scatter"]),
]


@pytest.mark.parametrize(("text", "forward", "backward"), TABLE)
def test_transition_values_and_gradients(text, forward, backward):
    before, after = tr.parse(text.split("->")[0]), tr.parse(text.split("->")[1])
    x = put((8, 8), before.spec)
    weight = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)

    def loss(x):
        y = tr.reshard(text, x)
        state = state_of(y)
        assert state.axes == tuple(dim.axes for dim in after.dims)
        assert state.copied == frozenset(after.copied)
        w = jax.reshard(jnp.asarray(weight), P(*[None] * 2) if after.copied else after.spec)
        if after.copied:  # a product takes copies; let it be with something sliced over those axes
            rows = jax.reshard(jnp.eye(8, dtype=jnp.float32), P("data", None))
            y = jnp.einsum("ra,ab->rb", rows, y, out_sharding=P("data", *after.spec.partitions[1:]))
            w = jax.reshard(jnp.asarray(weight), P("data", *after.spec.partitions[1:]))
        return jnp.sum(y * w)

    value, gradient = jax.jit(jax.value_and_grad(loss))(x)
    np.testing.assert_allclose(value, np.sum(np.arange(64.0).reshape(8, 8) * weight), rtol=1e-5)
    np.testing.assert_allclose(gradient, weight, rtol=1e-6)
    assert state_of(gradient).axes == state_of(x).axes
    rows = [r for r in ledger(jax.value_and_grad(loss), x).rows if "data" in r.axes and r.payload >= 64]
    moves = [r.kind for r in rows if r.direction == "forward"]
    assert (forward in moves) if forward else not moves
    assert [r.kind for r in rows if r.direction == "backward"] == backward


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("text", ["a/data c +model -> a/data c", "a/data c +model -> a/data c/model"])
def test_pending_sums_settle(text, eager):
    def run(x, w):
        partial = jnp.einsum("ab,bc->ac", x, w, out_sharding=P("data", None, unreduced={"model"}))
        return tr.reshard(text, partial)

    x, w = put((8, 16), P("data", "model")), put((16, 8), P("model", None))
    expected = np.arange(128.0).reshape(8, 16) @ np.arange(128.0).reshape(16, 8)
    np.testing.assert_allclose((run if eager else jax.jit(run))(x, w), expected, rtol=1e-5)


SCATTERED, SUMMED = (
    ("reduce-scatter", ("data",), 192),
    ("all-reduce", ("model",), 64),
)  # of 256 bytes, then of a quarter


@pytest.mark.parametrize(
    "text, rows",
    [
        ("a b +data +model -> a/data b", [SCATTERED, SUMMED]),
        ("a b +data +model -> a b/data", [SCATTERED, SUMMED]),
        ("a b +data +model -> a/data b/model", [SCATTERED, ("reduce-scatter", ("model",), 32)]),
        ("a b +data +model -> a/data/model b", [("reduce-scatter", ("data", "model"), 224)]),
        ("a b +data +model -> a/data b +model", [SCATTERED]),
        ("a b +model -> a/data b", [SUMMED]),
    ],
)
def test_what_lands_in_slices_is_scattered_before_the_rest_is_summed(text, rows):
    before, after = (tr.parse(part) for part in text.split("->"))

    def run(x, w):
        pending = jnp.einsum("ab,bc->ac", x, w, out_sharding=before.spec)
        return tr.reshard(f"{before} -> {after}", pending)

    x, w = put((8, 16), P(None, before.pending)), put((16, 8), P(before.pending, None))
    assert [(row.kind, row.axes, row.wire) for row in ledger(run, x, w).rows] == rows
    if not after.pending:
        expected = np.arange(128.0).reshape(8, 16) @ np.arange(128.0).reshape(16, 8)
        for found in (run(x, w), jax.jit(run)(x, w)):
            np.testing.assert_allclose(found, expected, rtol=1e-5)
            assert state_of(found).axes == tuple(dim.axes for dim in after.dims)


@pytest.mark.parametrize(
    "text, moves",
    [
        ("a/data b -> a b ~data ~model", [SCATTERED, SUMMED]),
        ("a/data b/model -> a b ~data ~model", [SCATTERED, ("reduce-scatter", ("model",), 32)]),
    ],
)
def test_the_gradient_of_copies_is_scattered_before_the_rest_is_summed(text, moves):
    rows = jax.device_put(jnp.arange(128.0).reshape(16, 8), jax.NamedSharding(MESH, P(("data", "model"), None)))

    def loss(x):
        whole = tr.reshard(text, x)
        return jnp.sum(jnp.einsum("ra,ab->rb", rows, whole, out_sharding=P(("data", "model"), None)))

    x = put((8, 8), tr.parse(text.split("->")[0]).spec)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), np.broadcast_to(np.sum(rows, 0)[:, None], (8, 8)), rtol=1e-6)
    moved = [(r.kind, r.axes, r.wire) for r in ledger(jax.grad(loss), x).rows if r.direction == "backward"]
    assert moved == moves


def test_verbs_check_their_transition():
    x = put((8, 8), P("data", None))
    assert tr.typeof(tr.all_gather("a/data b -> a b", x)) == "f32[8 8]"
    assert tr.typeof(tr.all_to_all("a/data b -> a b/data", x)) == "f32[8 8/data]"
    with pytest.raises(
        tr.ReshardError, match="all_reduce can only perform an all-reduce, got a transition that is all-gather"
    ):
        tr.all_reduce("a/data b -> a b", x)
    with pytest.raises(
        tr.ReshardError, match="reduce_scatter can only perform a reduce-scatter, got a transition that is nothing"
    ):
        tr.reduce_scatter("a/data b -> a/data b", x)


def test_left_side_must_be_what_the_array_is():
    x = put((8, 8), P("data", None))
    with pytest.raises(tr.ReshardError, match=r"got an array of type 'a/data b', in reshard\('a b/model -> a b'\)"):
        tr.reshard("a b/model -> a b", x)


@pytest.mark.parametrize("text", ["a/stage b -> a b", "a/data b -> a/data b +stage", "a/data b -> a/data b/stage"])
def test_a_text_names_axes_of_the_mesh(text):
    with pytest.raises(NotationError, match=rf"got 'stage' where the mesh has .*, in reshard\('{re.escape(text)}'\)"):
        tr.reshard(text, put((8, 8), P("data", None)))


def test_left_side_has_every_dimension():
    with pytest.raises(tr.ReshardError, match=r"got 1 names for an array of shape \(8, 8\)"):
        tr.reshard("a/data -> a", put((8, 8), P("data", None)))


def test_a_number_on_the_left_is_the_size():
    with jax.set_mesh(MESH):
        x = tr.reshard("a b -> a/data b", jnp.ones((8, 8)))
        assert tr.reshard("8/data b -> 8 b", x).shape == (8, 8)
        with pytest.raises(tr.ReshardError, match=r"got 7 for an array of shape \(8, 8\), .*: write 8, or a name"):
            tr.reshard("8/data 7 -> 8 7/model", x)


def test_ellipsis_keeps_leading_dimensions():
    x = put((8, 4, 2), P("data", None, "model"))
    assert tr.typeof(tr.reshard("... b/model -> ... b", x)) == "f32[8/data 4 2]"


def test_named_arrays_check_their_names():
    x = tr.named(put((8, 8), P("data", None)), "batch embed")
    assert tr.typeof(tr.reshard("batch/data embed -> batch embed", x)) == "f32[batch=8 embed=8]"
    with pytest.raises(tr.ReshardError, match="got 'batch mlp' for an array with 'batch embed'"):
        tr.reshard("batch/data mlp -> batch mlp", x)


def test_a_mesh_axis_divides_what_it_slices():
    with pytest.raises(NotationError, match=r"got a=6 over data=4, in 'a/data': make a 4 or 8"):
        tr.reshard("a -> a/data", put((6,), P(None)))


def test_without_a_mesh_nothing_moves():
    x = jax.device_put(np.ones(3, np.float32), jax.devices()[0])
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[0]), ())):
        assert tr.reshard("a/data -> a", x) is x


def test_auto_mode_constrains():
    auto = tr.make_mesh(data=4, model=2, axis_type="auto")
    with jax.set_mesh(auto):
        x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(auto, P("data")))
        move = lambda x: tr.reshard("a/data -> a", x)
        (constraint,) = jax.make_jaxpr(move)(x).eqns
        assert constraint.primitive.name == "sharding_constraint"
        assert constraint.params["sharding"].spec == P(None)
        np.testing.assert_array_equal(jax.jit(move)(x), np.arange(8.0))


slices = st.permutations([(), ("data",), ("model",), ("data", "model")]).map(lambda p: p[:3])


@pytest.mark.slow
@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(before=slices, after=slices)
def test_round_trips(before, after):
    def once(axes):
        seen, out = set(), []
        for mine in axes:
            out.append(tuple(a for a in mine if a not in seen))
            seen |= set(mine)
        return Shape(tuple(map(Dim, "abc", out)))

    there, back = once(before), once(after)
    with jax.set_mesh(MESH):
        x = put((8, 8, 8), there.spec)
        y = tr.reshard(f"{there} -> {back}", x)
        z = tr.reshard(f"{back} -> {there}", y)
    assert state_of(y).axes == tuple(d.axes for d in back.dims)
    np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(x, z)


def test_an_array_of_another_mesh_is_refused():
    here, there = (tr.make_mesh(jax.devices()[:count], x=count) for count in (2, 4))
    x = jax.device_put(jnp.ones(8), jax.NamedSharding(there, P("x")))
    refused = pytest.raises(ReshardError, match=r"got one of \(x=4\) where the mesh in force is \(x=2\)")
    with jax.set_mesh(here), refused:
        tr.reshard("a/x -> a", x)
    with jax.set_mesh(there):
        np.testing.assert_array_equal(tr.reshard("a/x -> a", x), np.ones(8))


def test_what_is_mapped_over_an_axis_is_not_cut_along_it():
    inside = lambda row: tr.reshard("b -> b/data", row)
    said = (
        r"got reshard\[b -> b/data\] in a vmap over data: leave 'data' out of the text, or reshard the result after "
        "the vmap"
    )
    with tr.Layout(MESH, compute={"a": "data"}):
        x = put((8, 8), P("data", None))
        for mapped, given in ((jax.vmap(inside), x), (tr.vmap(inside, "a"), tr.named(x, "a b"))):
            with pytest.raises(ReshardError, match=said):
                mapped(given)


def test_constant_booleans_are_summed_over_devices():
    """XLA ends the process where it knows what it sums (docs/published-bugs.md, 36)."""
    with tr.Layout(tr.make_mesh(x=8), compute={"e": "x"}):
        ones = lambda *names: tr.ones([tr.Axis(name, 8) for name in names], dtype=bool)
        made = jax.jit(lambda: tr.dot(ones("b", "e"), ones("e", "o"), over="e"))()
    assert tr.typeof(made) == "bool_[b=8 o=8]" and np.asarray(made).all()
