"""What loops repeat, what is zero by a program's text, and what a value is a copy of."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import trellis as tr
from trellis.inspect import ledger
from trellis.nn.loss import linear_cross_entropy
from trellis.program import trace
from trellis.program.flow import Parameters, constants, repeats, uniform
from trellis.program.reading import Argument, Program

STACK, LAYERS = jnp.ones((3, 4)), 3
NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


def over(body, carry, xs=None, length=5):
    return lax.scan(lambda c, x: (body(c, x), None), carry, xs, length=None if xs is not None else length)[0]


def same(function, *arguments):
    """In how many of its runs the program's one sine has the same operand, and how often it runs."""
    program = trace(function, *arguments)
    (sine,) = (operation for operation in program.walk() if operation.name == "sin")
    return repeats(program)[sine], sine.times


@pytest.mark.parametrize(
    "function, expected",
    [
        pytest.param(lambda w: jnp.sin(w).sum(), (1, 1), id="no loop"),
        pytest.param(lambda w: over(lambda c, _: c + jnp.sin(w), w), (5, 5), id="from outside"),
        pytest.param(lambda w: over(lambda c, _: jnp.sin(c), w), (1, 5), id="carried"),
        pytest.param(
            lambda w: over(lambda c, _: (c[0] + jnp.sin(c[1]), c[1]), (w, w))[0], (5, 5), id="carried as it is"
        ),
        pytest.param(
            lambda w: over(lambda c, _: over(lambda d, _: (d[0] + jnp.sin(d[1]), d[1]), c), (w, w))[0],
            (25, 25),
            id="carried through two loops",
        ),
        pytest.param(lambda w: over(lambda c, _: (jnp.sin(c[1]), c[0]), (w, w))[0], (1, 5), id="carried in turn"),
        pytest.param(lambda w: over(lambda c, x: c + jnp.sin(x), w[0], w), (1, 3), id="a slice a turn"),
        pytest.param(lambda w: over(lambda c, x: c + jnp.sin(x), w[0], w[:1]), (1, 1), id="one turn"),
        pytest.param(
            lambda w: over(lambda c, _: over(lambda d, x: d + jnp.sin(x), c, w), w[0]), (5, 15), id="layers in turns"
        ),
        pytest.param(
            lambda w: over(lambda c, _: over(lambda d, x: d + jnp.sin(c), c, w), w[0]), (3, 15), id="the outer loop's"
        ),
        pytest.param(
            lambda w: over(lambda c, i: c + jnp.sin(lax.dynamic_slice(w, (i, 0), (1, 4))), w[:1], jnp.arange(3)),
            (1, 3),
            id="picked by the turn",
        ),
        pytest.param(
            lambda w: over(lambda c, i: c + jnp.sin(lax.dynamic_slice(w, (i, 0), w.shape)).sum(), 0.0, jnp.arange(3)),
            (3, 3),
            id="all of it is picked",
        ),
        pytest.param(
            lambda w: over(lambda c, i: lax.cond(i > 0, lambda: c + jnp.sin(w), lambda: c), w, jnp.arange(4)),
            (4, 4),
            id="in a branch",
        ),
        pytest.param(
            lambda w: jnp.sin(over(lambda c, _: c * 2, w)) + over(lambda c, _: c * 3, w), (1, 1), id="a loop's result"
        ),
    ],
)
def test_turns_that_do_not_change_an_operand(function, expected):
    assert same(function, STACK) == expected


def test_a_row_says_what_a_compiler_may_move_once():
    mesh = tr.make_mesh(x=8)
    with jax.set_mesh(mesh):
        w = jax.reshard(jnp.ones((3, 8)), P(None, "x"))
        gather = lambda w: tr.reshard("a/x -> a", w)
        turns = ledger(lambda w: over(lambda c, _: over(lambda d, x: d + gather(x), c, w), jnp.ones(8)), w)
    assert [(row.kind, row.times, row.same) for row in turns] == [("all-gather", 15, 5)]


def parts():
    """Zeros, as each device's part of a sum."""
    return lax.broadcast_in_dim(jnp.float32(0), (8,), (), out_sharding=P(None, unreduced={"x"}))


def test_zeros_move_nothing():
    """The sum over microbatches of the gradient of what has none."""
    with jax.set_mesh(tr.make_mesh(x=8)):
        settled = lambda: tr.reshard("a +x -> a", over(lambda total, _: total + parts(), parts()))
        assert len(ledger(settled)) == 0


@pytest.mark.parametrize("swaps", [False, True])
def test_what_turns_add_to_zeros_moves(swaps):
    """Of two carries one stays zero, but where turns swap them."""

    def settled(x):
        def turn(totals, _):
            zeros, total = totals
            total = total + jnp.einsum("ab,b->a", x, x[0], out_sharding=P(None, unreduced={"x"}))
            return (total, zeros) if swaps else (zeros, total), None

        (first, _), _ = lax.scan(turn, (parts(), parts()), length=3)
        return tr.reshard("a +x -> a", first)

    with jax.set_mesh(tr.make_mesh(x=8)):
        rows = ledger(settled, jax.reshard(jnp.ones((8, 8)), P(None, "x"))).rows
    assert [row.kind for row in rows] == (["all-reduce"] if swaps else [])


def test_what_is_made_of_zeros_is_found_again():
    """Optax's norm adds the square of an imaginary part, of zeros: TPUs sum a norm that is computed twice once."""
    with jax.set_mesh(tr.make_mesh(tr.target_devices("v5e:2x4"), x=8)):
        x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.NamedSharding(jax.sharding.get_mesh(), P("x")))
        assert ledger(lambda x: optax.tree.norm(x) + optax.tree.norm(x), x).count() == 1


@pytest.mark.parametrize(
    ("function", "known"),
    [
        pytest.param(lambda w: jnp.sin(STACK) + w, True, id="closed over"),
        pytest.param(lambda w: w + jnp.sin(jnp.zeros((3, 4)) + jnp.arange(4.0)[None]), True, id="made here"),
        pytest.param(lambda w: jnp.sin(w), False, id="an argument"),
        pytest.param(lambda w: jax.jit(lambda v, s: v + jnp.sin(s))(w, STACK), True, id="given to a call"),
        pytest.param(lambda w: over(lambda c, _: c + jnp.sin(STACK[0]), w[0]), True, id="in a loop"),
        pytest.param(lambda w: over(lambda c, x: c + jnp.sin(x), w[0], STACK), False, id="a slice a turn"),
        pytest.param(lambda w: over(lambda c, _: jnp.sin(c), STACK[0]) + w[0], False, id="carried"),
        pytest.param(lambda w: lax.cond(w[0, 0] > 0, lambda: jnp.sin(STACK), lambda: STACK), True, id="in a branch"),
        pytest.param(lambda w: lax.cond(w[0, 0] > 0, lambda v: jnp.sin(v), lambda v: v, w), False, id="of a branch"),
        pytest.param(lambda w: w + jnp.sin(jax.pure_callback(lambda: 1.0, NUMBER)), False, id="of a callback"),
    ],
)
def test_what_is_made_of_no_argument(function, known):
    program = trace(function, STACK)
    (sine,) = (operation for operation in program.walk() if operation.name == "sin")
    assert constants(program).issuperset(sine.results) == known


@pytest.mark.parametrize(
    "of", [lambda x: jnp.sin(lax.axis_index("x").astype(jnp.float32)) + x, lambda x: jnp.sin(1.0 + x)]
)
def test_what_each_device_has_of_its_own_is_not_made_of_nothing(of):
    mesh = tr.make_mesh(x=8)
    x = jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, P("x")))
    program = trace(jax.shard_map(of, mesh=mesh, in_specs=P("x"), out_specs=P("x")), x)
    (sine,) = (operation for operation in program.walk() if operation.name == "sin")
    assert not constants(program).issuperset(sine.results)


@pytest.mark.parametrize("name", ["a", "b", "bb", "layer.w", "head.w"])
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(0.1)])
def test_a_gradient_is_that_of_the_parameter_whose_change_it_becomes(name, optimizer):
    """Of parameters of one shape, whose names end as others' do."""
    mesh = tr.make_mesh(x=8)
    first, _, last = name.partition(".")
    row = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=jax.NamedSharding(mesh, P("x", None)))
    w = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.NamedSharding(mesh, P("x")))
    params = {"a": w, "b": w, "bb": w, "layer": {"w": w}, "head": {"w": w}}

    def loss(params, row):
        w = params[first][last] if last else params[first]
        w = jax.reshard(w, P(None, reduced={"x"}))
        return jnp.einsum("ab,b->a", row, w, out_sharding=P("x")).sum()

    def step(params, state, row):
        updates, state = optimizer.update(jax.grad(loss)(params, row), state)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        rows = ledger(step, params, jax.eval_shape(optimizer.init, params), row)
    assert {row.parameter for row in rows if row.role == "gradients"} == {name}


def test_what_an_optimizer_keeps_is_for_the_parameter_with_the_same_path():
    of = ["model.w", "model.mlp.w", "teacher.w"]
    kept = {"state.mu.mlp.w": "model.mlp.w", "state.mu.model.w": "model.w", "state.mu.w": "", "state.count": ""}
    arguments = [Argument(name, "parameters", "") for name in of] + [Argument(name, "optimizer", "") for name in kept]
    program = Program(jax.make_jaxpr(lambda *xs: [x + 1 for x in xs])(*[1.0] * len(arguments)).jaxpr, arguments)
    ends = Parameters(program).ends
    assert [ends.get(result, "") for result in program.results] == of + list(kept.values())


def test_a_number_behind_a_barrier_is_not_known():
    program = trace(lambda x: (x + jnp.zeros(4), x + lax.optimization_barrier(jnp.zeros(4))), jnp.ones(4))
    added = [operation.operands[1] for operation in program.walk() if operation.name == "add"]
    assert [value in uniform(program) for value in added] == [True, False]


def test_a_table_that_the_loss_gathers_in_chunks_is_named():
    mesh = tr.make_mesh(data=8)
    given = lambda dtype, shape, *axes: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))
    x, targets = given(jnp.float32, (8, 4, 16), "data"), given(jnp.int32, (8, 4), "data")
    loss = lambda model, x, targets: linear_cross_entropy(x, model["table"], targets, vocab_first=True).total
    with jax.set_mesh(mesh):
        rows = ledger(loss, {"table": given(jnp.float32, (64, 16), "data")}, x, targets)
    assert [(row.kind, row.parameter) for row in rows][:1] == [("all-gather", "table")]
