"""Random programs in manual mode, right and wrong ones: what is not refused has one device's value and gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding

from trellis.mesh import reshard
from trellis.mesh.manual.einsum import einsum_plain as einsum
from trellis.mesh.manual.shard_map import shard_map
from trellis.notation import ArrayType, Dim, NotationError, Shape

SIZES = {"a": 8, "b": 16, "c": 8, "d": 8}
AXES = ("x", "y", "z")


@functools.cache
def mesh():
    return jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Explicit,) * 3)


def slices(draw, names: str, allowed=AXES) -> Shape:
    """The names, each mesh axis slicing one of them or none."""
    places = {axis: draw(st.sampled_from([None, *names])) for axis in draw(st.permutations(allowed))}
    return Shape(tuple(Dim(name, tuple(a for a, p in places.items() if p == name)) for name in names))


def moved(draw, shape: Shape) -> Shape:
    """The same dimensions elsewhere, some axes perhaps as copies."""
    after = slices(draw, "".join(shape.names))
    copied = [a for a in AXES if a not in after.mesh_axes and draw(st.booleans())]
    return Shape(after.dims, (), tuple(copied))


def perhaps_wrong(draw, shape: Shape) -> Shape:
    """The shape, or now and then another one: a state more or less, or two mesh axes (of one size) exchanged."""
    what = draw(st.sampled_from(["right", "right", "right", "swap", "swap", "less", "more", "pending"]))
    if what == "swap":
        x, y = draw(st.permutations(AXES))[:2]
        swap = lambda axes: tuple({x: y, y: x}.get(a, a) for a in axes)
        dims = tuple(Dim(d.name, swap(d.axes)) for d in shape.dims)
        return Shape(dims, tuple(sorted(swap(shape.pending))), tuple(sorted(swap(shape.copied))))
    if what == "less" and (shape.mesh_axes or shape.pending or shape.copied):
        gone = draw(st.sampled_from([*shape.mesh_axes, *shape.pending, *shape.copied]))
        keep = lambda axes: tuple(a for a in axes if a != gone)
        return Shape(tuple(Dim(d.name, keep(d.axes)) for d in shape.dims), keep(shape.pending), keep(shape.copied))
    free = [a for a in AXES if a not in (*shape.mesh_axes, *shape.pending, *shape.copied)]
    if what == "more" and free and shape.dims:
        axis, i = draw(st.sampled_from(free)), draw(st.integers(0, len(shape.dims) - 1))
        dims = [Dim(d.name, (*d.axes, axis) if k == i else d.axes) for k, d in enumerate(shape.dims)]
        return Shape(tuple(dims), shape.pending, shape.copied)
    if what == "pending" and free:
        return Shape(shape.dims, tuple(sorted((*shape.pending, draw(st.sampled_from(free))))), shape.copied)
    return shape


def product_of(left: Shape, right: Shape, names: str) -> Shape:
    """The type that a product of two operands has, where it has one."""
    axes = {dim.name: dim.axes for shape in (left, right) for dim in shape.dims}
    pending = tuple(sorted({a for name, mine in axes.items() if name not in names for a in mine}))
    return Shape(tuple(Dim(name, axes[name]) for name in names), pending)


@st.composite
def programs(draw, wrong: bool):
    """Two arguments, where they are, where they go, their product, and where that goes."""
    mutate = functools.partial(perhaps_wrong, draw) if wrong else lambda shape: shape
    left, right = slices(draw, "ab"), slices(draw, "bc")
    out = draw(st.sampled_from(["ac", "ca", "abc", "c", ""]))
    to_left = moved(draw, left)
    if wrong and draw(st.booleans()):
        to_right = moved(draw, right)
    else:  # the same slices of the name they share, other axes for the other name
        shared = to_left.dims[1].axes
        free = tuple(a for a in AXES if a not in to_left.mesh_axes)
        other = slices(draw, "c", free)
        copied = tuple(a for a in to_left.dims[0].axes if draw(st.booleans()))
        to_right = Shape((Dim("b", shared), *other.dims), (), tuple(sorted(copied)))
        used = {a for a in to_left.copied if a in to_right.mesh_axes}
        to_left = Shape(to_left.dims, (), tuple(sorted(used)))
    result = product_of(to_left, to_right, out)
    end = slices(draw, out) if out else Shape()
    steps = [(mutate(left), to_left), (mutate(right), to_right)]
    texts = [mutate(to_left), mutate(to_right), mutate(result)]
    return left, right, out, steps, texts, (mutate(texts[2]), end)


def run(program):
    left, right, out, steps, (x_text, y_text, text), (before, end) = program

    def body(x, y):
        x = reshard(f"{steps[0][0]} -> {steps[0][1]}", x)
        y = reshard(f"{steps[1][0]} -> {steps[1][1]}", y)
        return reshard(f"{before} -> {end}", einsum(f"{x_text}, {y_text} -> {text}", x, y))

    body.__annotations__ = {"x": ArrayType("f32", left), "y": ArrayType("f32", right), "return": ArrayType("f32", end)}
    arrays = [
        jnp.cos(jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape))
        for shape in ([SIZES[n] for n in "ab"], [SIZES[n] for n in "bc"])
    ]
    weights = jnp.sin(jnp.arange(np.prod([SIZES[n] for n in out], dtype=int), dtype=jnp.float32))
    weights = weights.reshape([SIZES[n] for n in out])
    whole = lambda x, y: jnp.sum(jnp.einsum(f"ab,bc->{out}", x, y) * weights)
    with jax.set_mesh(mesh()):
        x, y = (jax.device_put(a, NamedSharding(mesh(), s.spec)) for a, s in zip(arrays, (left, right), strict=True))
        there = jax.device_put(weights, NamedSharding(mesh(), end.spec))
        loss = lambda x, y: jnp.sum(shard_map(body)(x, y) * there)
        got = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, y)
    want = jax.value_and_grad(whole, argnums=(0, 1))(*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), jax.device_get(got), want)


@pytest.mark.slow
@given(programs(wrong=False))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_right_programs_run(program):
    run(program)


@pytest.mark.slow
@given(programs(wrong=True))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_wrong_programs_are_refused_or_right(program):
    try:
        run(program)
    except NotationError:
        pass
