"""Ways between shardings: every step is the one collective that it says, and none is longer than the compiler's own."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import trellis as tr
from trellis.inspect.collective import collectives_in
from trellis.inspect.hlo import parse_program
from trellis.mesh.reshard import place
from trellis.mesh.route import route
from trellis.notation import spec_of
from trellis.notation.state import State
from trellis.program.moves import transition, wire_bytes

SHAPE = (16, 16)


def placements(axes, rank):
    for homes in itertools.product(range(-1, rank), repeat=len(axes)):
        held = [[axis for axis, home in zip(axes, homes, strict=True) if home == i] for i in range(rank)]
        yield from itertools.product(*map(itertools.permutations, held))


def some(count, *axes):
    every = sorted(placements(axes, len(SHAPE)))
    pairs = [(before, after) for before in every for after in every if before != after]
    return random.Random(3).sample(pairs, count)


def sent(mesh, before, function):
    """What the compiled program sends: its collectives, and the bytes of each."""
    like = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=NamedSharding(mesh, spec_of(before)))
    with jax.set_mesh(mesh):
        text = jax.jit(function).lower(like).compile().as_text()
    return [
        (c.kind, wire_bytes(c.kind, c.size, sum(map(c.payload, c.arrays))))
        for c in collectives_in(parse_program(text), mesh.size)
    ]


def move(mesh, after):
    return lambda x: jax.reshard(x, NamedSharding(mesh, spec_of(after)))


@pytest.mark.slow
@pytest.mark.parametrize("sizes, count", [(dict(x=2, y=2, z=2), 24), (dict(x=4, y=2), 8)])
def test_each_step_is_one_collective_of_the_bytes_that_the_ledger_says(sizes, count):
    mesh = tr.make_mesh(**sizes)
    shorter = 0
    for before, after in some(count, *sizes):
        at, total = before, 0
        for step in route(before, after, SHAPE, sizes):
            moves = transition(State("explicit", at), State("explicit", step), 4 * 16 * 16, sizes)
            compiled = sent(mesh, at, move(mesh, step))
            assert sum(b for _, b in compiled) == sum(m.wire for m in moves), (at, step)
            assert {kind for kind, _ in compiled} == {m.kind for m in moves}, (at, step)
            assert len({m.kind for m in moves}) <= 1
            at, total = step, total + sum(m.wire for m in moves)
        at_once = sum(b for _, b in sent(mesh, before, move(mesh, after)))
        # A permute may also send parts of slices, which is no step here: at most half as much again.
        assert total <= 1.5 * at_once, (before, after)
        shorter += total < at_once
    assert shorter >= count // 5, "XLA finds the way in one step, too"


def test_values_gradients_and_bytes_of_a_transition_of_several_kinds():
    """Slices, an all-to-all and an all-gather: XLA's partitioner makes one gather of the whole array of them."""
    mesh = tr.make_mesh(x=2, y=2, z=2)
    before, after = (("x", "y"), ()), (("z",), ("y",))
    like = NamedSharding(mesh, spec_of(before))
    x = jax.device_put(np.arange(256, dtype=np.float32).reshape(SHAPE), like)
    weights = jax.device_put(
        np.cos(np.arange(256, dtype=np.float32)).reshape(SHAPE), NamedSharding(mesh, spec_of(after))
    )
    with jax.set_mesh(mesh):
        value, gradient = jax.jit(jax.value_and_grad(lambda x: (place(x, after) * weights).sum()))(x)
    np.testing.assert_allclose(value, np.vdot(x, weights), rtol=1e-4)
    np.testing.assert_allclose(gradient, weights)
    assert gradient.sharding.spec == like.spec
    in_steps = sum(b for _, b in sent(mesh, before, lambda x: place(x, after)))
    assert in_steps < sum(b for _, b in sent(mesh, before, move(mesh, after)))


def test_sums_settle_before_slices_go_elsewhere():
    mesh = tr.make_mesh(x=2, y=2, z=2)
    with jax.set_mesh(mesh):
        x = jax.device_put(np.arange(256, dtype=np.float32).reshape(SHAPE), NamedSharding(mesh, spec_of(((), ("x",)))))

        def moved(x):
            halves = jax.reshard(x, NamedSharding(mesh, spec_of(((), ("x",)), ("z",))))
            return place(halves, (("x", "z"), ()))

        np.testing.assert_array_equal(jax.jit(moved)(x), x)


def test_steps_divide_their_dimensions():
    """No step cuts a dimension into parts of different sizes."""
    sizes = {"x": 2, "y": 3}
    assert route((("x",),), (("y",),), (6,), sizes) == [(("x", "y"),), (("y", "x"),), (("y",),)]
    assert route((("x",), ()), ((), ("y",)), (4, 9), sizes) == [(("x",), ("y",)), ((), ("y",))]
