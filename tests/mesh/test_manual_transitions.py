"""Every transition in manual mode: values and gradients against the whole array on one device, with rank-coded "
"inputs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding

from tests.mesh.told import told
from trellis.mesh.manual.ops import mark_pending
from trellis.mesh.manual.reshard import TransitionError, manual_reshard
from trellis.mesh.manual.shard_map import shard_map
from trellis.notation import ArrayType, Dim, NotationError, Shape, parse_transition, spec_of
from trellis.notation.binding import real_axes
from trellis.notation.transition import kind_of, plan


@functools.cache
def mesh_of(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))


def finish(shape: Shape, sizes: dict) -> Shape:
    """The same without states: sums settled, copies sliced into a dimension that is large enough."""
    dims = list(shape.dims)
    for axis in shape.copied:
        dims[0] = Dim(dims[0].name, (*dims[0].axes, axis))
    return Shape(tuple(dims))


def apply(before: Shape, after: Shape, whole, cotangent, mesh, axes=None):
    """The transition on `whole`, and the gradient of `sum(cotangent * result)`; both as whole arrays.

    Along a pending axis device i holds (i + 1) times the value, so the sum is n (n + 1) / 2 times the value.
    """
    start, end = Shape(before.dims), finish(after, mesh.shape)

    def program(x):
        for axis in before.pending:
            x = x * (jax.lax.axis_index(axis) + 1).astype(x.dtype)
        x = mark_pending(x, before.pending)
        if before.copied:
            held = Shape(before.dims, before.pending, ())
            x = manual_reshard(held, before, x)
        x = manual_reshard(before, after, x)
        return manual_reshard(after, end, x)

    program.__annotations__ = {"x": ArrayType("f32", start), "return": ArrayType("f32", end)}
    mapped = shard_map(program, axes=axes)

    def loss(x):
        y = mapped(x)
        return jnp.sum(y * jax.reshard(cotangent, jax.typeof(y).sharding.spec)), y

    with jax.set_mesh(mesh):
        x = jax.device_put(whole, NamedSharding(mesh, start.spec))
        (_, y), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
        axes = [dim.axes for dim in real_axes(end, mesh).dims]
        assert jax.typeof(y).sharding.spec == spec_of(axes)
        return np.asarray(y), np.asarray(gradient)


def hold(text: str, mesh, sizes=(8, 16), axes=None):
    before, after = parse_transition(text)
    shape = sizes[: len(before.dims)]
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1
    cotangent = np.cos(whole).astype(np.float32)
    factor = np.prod([mesh.shape[a] * (mesh.shape[a] + 1) / 2 for a in before.pending])
    value, gradient = apply(before, after, whole, jnp.asarray(cotangent), mesh, axes)
    np.testing.assert_allclose(value, whole * factor, rtol=1e-6)
    np.testing.assert_allclose(gradient, cotangent * factor, rtol=1e-5, atol=1e-5)


TABLE = [
    "a/x b -> a b",
    "a/x b -> a b ~x",
    "a b +x -> a b",
    "a b +x -> a/x b",
    "a b +x -> a b/x",
    "a/x b -> a b/x",
    "a b -> a/x b",
    "a b -> a b ~x",
    "a b ~x -> a b/x",
    "a b +x -> a b ~x",
    "a/x/y b -> a b ~x ~y",
    "a/y/x b -> a b",
    "a/x/y b -> a/x b ~y",
    "a/x/y b -> a b ~x",
    "a/x/y b -> a/y b",
    "a/x/y b -> a/y/x b",
    "a/x/y b -> a b/x/y",
    "a/x/y b -> a b/y/x",
    "a b -> a/x/y b",
    "a b -> a/y b/x",
    "a b +x +y -> a/x/y b",
    "a b +x +y -> a/y b/x",
    "a b +x +y -> a b",
    "a b/y +x -> a/x b",
    "a/y b +x -> a/x/y b",
    "a/x b/y -> a/y b/x",
    "a/x b -> a/y b",
    "a/x b +y -> a/x b/y",
    "a/x b +y -> a b ~x",
    "a/x b/y -> a b/y ~x",
    "a +x -> a/x",
    "a/x -> a ~x",
]


@pytest.mark.slow(but=12)
@pytest.mark.parametrize("text", TABLE)
def test_transition_and_its_gradient(text):
    hold(text, mesh_of(x=4, y=2))


@pytest.mark.parametrize("text", ["a/x b -> a b ~x", "a b +x -> a/x b", "a b -> a/x b", "a/y/x b +z -> a/z b/y ~x"])
def test_an_axis_of_size_one_moves_nothing(text):
    hold(text, mesh_of(x=1, y=2, z=4))


def test_all_axes_of_size_one():
    hold("a/x b +y -> a/y b ~x", mesh_of(x=1, y=1))


@st.composite
def transitions(draw):
    axes = draw(st.permutations(["x", "y", "z"]))
    rank = draw(st.integers(1, 3))
    sides = [[[] for _ in range(rank)], [[] for _ in range(rank)]]
    states = [{"+": [], "~": []}, {"+": [], "~": []}]
    for axis in axes:
        before = draw(st.sampled_from([*range(rank), "+", "~", None]))
        choices = {"+": [*range(rank), "+", "~", None], "~": [*range(rank), "~"], None: [*range(rank), "~", None]}
        after = draw(st.sampled_from(choices.get(before, [*range(rank), "~", None])))
        for side, state, place in zip(sides, states, (before, after), strict=True):
            if isinstance(place, int):
                side[place].insert(draw(st.integers(0, len(side[place]))), axis)
            elif place:
                state[place].append(axis)
    return tuple(
        Shape(
            tuple(Dim(name, tuple(mine)) for name, mine in zip("abc", side, strict=False)),
            tuple(sorted(state["+"])),
            tuple(sorted(state["~"])),
        )
        for side, state in zip(sides, states, strict=True)
    )


@pytest.mark.slow
@given(transitions())
@settings(max_examples=300, deadline=None)
def test_a_plan_leads_from_before_to_after(both):
    before, after = both
    steps = plan(before, after)
    held = before
    for step in steps:
        assert step.before == held
        held = step.after
    assert held == after
    assert bool(steps) == (before != after)
    assert [kind for kind, *_ in kind_of(before, after)] == [step.kind for step in steps]


@pytest.mark.slow
@given(transitions())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_transition_and_its_gradient(both):
    before, after = both
    hold(f"{before} -> {after}", mesh_of(x=2, y=2, z=2), (8, 16, 8))


PARTIAL = [
    "a/x b -> a b",
    "a/x b -> a b ~x",
    "a b +x -> a b",
    "a b +x -> a/x b",
    "a/x b -> a b/x",
    "a b -> a/x b",
    "a b -> a b ~x",
    "a b ~x -> a b/x",
    "a b +x -> a b ~x",
    "a b +x -> a b/x",
]


@pytest.mark.parametrize("text", PARTIAL)
def test_transition_with_other_axes_left_to_the_program(text):
    hold(text, mesh_of(x=4, y=2), axes={"x"})


@pytest.mark.parametrize(
    "text", ["a/y/x b -> a b ~x ~y", "a b +x +y -> a/x b/y", "a/x b/y -> a/y b/x", "a/x/y b -> a b/x/y"]
)
def test_two_manual_axes_with_a_third_left_to_the_program(text):
    hold(text, mesh_of(x=2, y=2, z=2), axes={"x", "y"})


@pytest.mark.parametrize("text", ["a/x b/y -> a b/y ~x", "a b/y +x -> a/x b/y", "a/x b/y -> a b/y", "a b/y -> a/x b/y"])
def test_arrays_keep_their_sharding_over_axes_left_to_the_program(text):
    hold(text, mesh_of(x=4, y=2), axes={"x"})


COLLECTIVES = {
    # transition: (forward, gradient), as the names of the collectives in the program
    "a/x b -> a b": (["all_gather_invariant"], []),
    "a/x b -> a b ~x": (["all_gather_reduced"], ["unreduced_reduce_scatter"]),
    "a b +x -> a b": (["unreduced_psum"], []),
    "a b +x -> a/x b": (["unreduced_reduce_scatter"], ["all_gather_reduced"]),
    "a/x b -> a b/x": (["all_to_all"], ["all_to_all"]),
    "a b -> a/x b": ([], ["all_gather_invariant"]),
    "a b -> a b ~x": ([], ["unreduced_psum"]),
}


def collectives(jaxpr) -> list[str]:
    found = []
    for eqn in jaxpr.eqns:
        if re.search("psum|all_gather|reduce_scatter|all_to_all|ppermute", eqn.primitive.name):
            found.append(eqn.primitive.name)
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += collectives(inner)
    return found


@pytest.mark.parametrize("text", COLLECTIVES)
def test_a_transition_is_one_collective_and_so_is_its_gradient(text):
    before, after = parse_transition(text)

    def program(x):
        return manual_reshard(before, after, x)

    # Full states on both sides, so that nothing but the transition itself moves.
    program.__annotations__ = {"x": ArrayType("f32", before), "return": ArrayType("f32", after)}
    mesh = mesh_of(x=4, y=2)
    with jax.set_mesh(mesh):
        x, y = (
            jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, side.spec))
            for side in (before, after)
        )
        dual = NamedSharding(mesh, Shape(after.dims, after.copied, after.pending).spec)
        forward = jax.make_jaxpr(shard_map(program))(x)
        ct = jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=dual)
        backward = jax.make_jaxpr(lambda x, ct: jax.vjp(shard_map(program), x)[1](ct))(x, ct)
    wanted = COLLECTIVES[text]
    assert collectives(forward.jaxpr) == wanted[0]
    assert collectives(backward.jaxpr) == wanted[0] + wanted[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a/x b -> a b +x",
            "only a product or a sum over a sliced dimension can make a pending sum, got 'a/x b -> a b +x', in "
            "reshard('a/x b -> a b +x'): remove '+x' on the right",
        ),
        (
            "a b ~x -> a b",
            "a copy ~x is already whole on each device and cannot be cast back, got 'a b ~x -> a b', in reshard('a b "
            "~x -> a b'): use the value from before the cast to ~x",
        ),
    ],
)
def test_impossible_transitions(text, message):
    with pytest.raises(TransitionError) as caught:
        hold(text, mesh_of(x=4, y=2))
    assert message in told(caught, by_line=True)


def test_a_dimension_that_does_not_divide():
    message = (
        "a dimension must be divisible by the mesh axes that slice it, got a=6 over x=4, in reshard('a b -> a/x b'): "
        "make a 4 or 8, or slice it over other axes"
    )
    with pytest.raises(NotationError) as caught:
        hold("a b -> a/x b", mesh_of(x=4, y=2), (6, 4))
    assert message in told(caught, by_line=True)
