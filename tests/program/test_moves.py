"""What a placement's change moves: the notation's one answer, the planner's, and the compiler's."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

import trellis as tr
from trellis.inspect import ledger, structure_of
from trellis.inspect.collective import collectives_in
from trellis.inspect.hlo import parse_program
from trellis.notation import kind_of, parse_transition, spec_of
from trellis.notation.state import State
from trellis.program.moves import transition

SIZES = {"x": 2, "y": 4}


def states():
    """Each mesh axis slices the first dimension, the second, holds partial sums, or copies."""
    for x, y in itertools.product(("a", "b", "+", "~", ""), repeat=2):
        homes = {"x": x, "y": y}
        held = {home: [axis for axis in homes if homes[axis] == home] for home in "ab+~"}
        orders = [held["a"], held["a"][::-1]], [held["b"], held["b"][::-1]]
        for a, b in itertools.product(*({tuple(each) for each in order} for order in orders)):
            yield State("explicit", (a, b), frozenset(held["+"]), frozenset(held["~"]))


def pairs_of_one_step():
    """Transitions that the notation says are one step.

    But for a sum that is scattered against the mesh's order, after which a compiler permutes; and for casts that no
    gradient takes, which slice too.
    """
    for before, after in itertools.permutations(states(), 2):
        steps = kind_of(*parse_transition(f"{before.words('ab')} -> {after.words('ab')}"))
        kind, axes, _ = steps[0]
        slices = any(set(now) - set(was) for was, now in zip(before.axes, after.axes))
        if len(steps) == 1 and not (kind == "cast" and slices) and (kind, axes) != ("reduce-scatter", ("y", "x")):
            yield before, after, steps[0]


def test_what_is_one_step_in_the_notation_is_one_collective():
    found = list(pairs_of_one_step())
    assert len(found) > 200
    for before, after, (kind, axes, _) in found:
        moves = [(move.kind, set(move.axes)) for move in transition(before, after, 4096, SIZES)]
        assert moves == ([] if kind in ("slice", "cast") else [(kind, set(axes))]), (before, after)


def test_a_sum_over_the_axis_that_its_slices_go_to_is_whole():
    """The gradient of slices that went to another mesh axis as copies, held against the compiled program."""
    mesh = tr.make_mesh(jax.devices()[:4], x=2, z=2)
    array = lambda shape, *spec: jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, jax.P(*spec)))
    moved = lambda x: tr.reshard("m/x k -> m/z k ~x", x)
    gradient = jax.grad(lambda x, v: (jax.numpy.einsum("mk,nk->mn", moved(x), v) ** 2).sum())
    args = array((24, 16), "x"), array((24, 16), "x")
    with jax.set_mesh(mesh):
        found, compiled = ledger(gradient, *args), jax.jit(gradient).lower(*args).compile()
        assert structure_of(found, compiled, mesh).right
    backward = [(row.kind, set(row.axes)) for row in found if row.direction == "backward"]
    assert backward == [("all-reduce", {"x"}), ("permute", {"x", "z"})]


@pytest.mark.parametrize(
    "text, sent",
    [
        ("a/x b -> a b +x", []),
        ("a/y/x b -> a/y b +x", []),
        ("a/x b/y -> a b +x +y", []),
        ("a/x b/y -> a b +x", [("all-gather", 3 * 64)]),  # over y, of halves
        ("a/x/y b -> a b +y", [("all-gather", 256)]),  # over x, of what is a part of the sum then
    ],
)
def test_slices_become_parts_of_a_sum_where_they_are(text, sent):
    """The gradient of slices of copies: beside it stands another sum, or the compiler takes both steps for one."""
    mesh = tr.make_mesh(**SIZES)
    before, after = parse_transition(text)
    like = NamedSharding(mesh, spec_of([dim.axes for dim in before.dims]))
    x = jax.device_put(np.arange(128, dtype=np.float32).reshape(8, 16), like)
    whole = " ".join("/".join((str(dim.name), *dim.axes)) for dim in after.dims)

    def settled(x, other):
        parts = tr.reshard(text, x) + tr.reshard(f"{whole} -> {after}", other)
        return tr.reshard(f"{after} -> {whole}", parts)

    with jax.set_mesh(mesh):
        like = NamedSharding(mesh, spec_of([dim.axes for dim in after.dims]))
        other = jax.device_put(np.ones((8, 16), np.float32), like)
        rows = ledger(settled, x, other).rows[:-1]
        compiled = jax.jit(settled).lower(x, other).compile()
        np.testing.assert_array_equal(compiled(x, other), np.asarray(x) + 1)
    assert [(row.kind, row.wire) for row in rows] == sent
    assert len([*collectives_in(parse_program(compiled.as_text()), mesh.size)]) == len(sent) + 1
