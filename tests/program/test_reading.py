"""One reading of a program: calls written out, loops and branches as bodies, passes, counts, sizes on a device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import trellis as tr
from trellis.inspect.work import work
from trellis.program import trace
from trellis.program.flow import of_parameters, origin, roles
from trellis.program.reading import ENTER, LEAVE

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


def named(program, *names):
    return [operation for operation in program.walk() if operation.name in names]


def test_calls_are_written_out_and_values_are_one_inside_and_outside():
    squash = jax.jit(lambda x: jnp.tanh(x * 2))
    program = trace(lambda x: squash(squash(x)), jnp.ones(3))
    assert [operation.name for operation in program.operations] == ["mul", "tanh", "mul", "tanh"]
    first, second = named(program, "tanh")
    assert program.operations[2].operands[0] is first.results[0]
    assert first.results[0].readers == [program.operations[2]] and program.results == [second.results[0]]
    assert first.frame is not second.frame and first.frame.around == second.frame.around
    assert [operation.number for operation in program.operations] == [0, 1, 2, 3]


def custom_jvp(f):
    wrapped = jax.custom_jvp(f)
    wrapped.defjvp(lambda x, d: (f(*x), d[0]))
    return wrapped


def custom_vjp(f):
    wrapped = jax.custom_vjp(f)
    wrapped.defvjp(lambda x: (f(x), None), lambda _, d: (d,))
    return wrapped


@pytest.mark.parametrize(
    "wrap",
    [jax.jit, jax.checkpoint, custom_jvp, custom_vjp],
    ids=["jit", "checkpoint", "custom jvp", "custom vjp"],
)
def test_every_kind_of_call(wrap):
    program = trace(lambda x: wrap(lambda x: jnp.sin(x))(x) + 1, jnp.ones(3))
    assert [operation.name for operation in program.operations] == ["sin", "add"]


@pytest.mark.parametrize("loop", [False, True], ids=["once", "in a loop"])
def test_forward_mode_shows_the_products_of_a_derivative_that_nobody_traced(loop):
    w, x = tr.named(jnp.ones((4, 4)), "e o"), tr.named(jnp.ones((3, 4)), "b e")
    run = lambda w: tr.dot(x, w, over="e").sum()
    change = lambda w: jax.jvp(run, (w,), (w,))[1]
    program = trace(lambda w: lax.fori_loop(0, 5, lambda _, s: s + change(w), tr.zeros({})) if loop else change(w), w)
    (product,) = named(program, "dot_general")  # the result itself is not asked for
    assert product.times == (5 if loop else 1)


def test_loops_are_multiplied_out_and_their_inputs_know_what_enters():
    def run(w, x):
        inner = lambda x, _: (x @ w, None)
        return lax.scan(lambda x, row: (lax.scan(inner, x + row, None, length=3)[0], x), x, jnp.ones((5, 4)))

    program = trace(run, jnp.ones((4, 4)), jnp.ones(4))
    (product,) = named(program, "dot_general")
    assert product.times == 15
    outer, inner = named(program, "scan")
    assert (outer.times, inner.times) == (1, 5)
    # Constants, carries, then slices of what is scanned.
    assert [value.shape for value in outer.bodies[0].inputs] == [(4, 4), (4,), (4,)]
    weight = product.operands[1]
    assert weight.outer is not None and origin(weight) is program.inputs[0]


def test_while_loops_and_branches():
    def run(x, n):
        x = lax.fori_loop(0, n, lambda i, x: jnp.sin(x), x)
        return lax.cond(n > 3, lambda x: jnp.cos(x), lambda x: x * 2, x)

    program = trace(run, jnp.ones(3), jnp.int32(2))
    (loop,), (branch,) = named(program, "while"), named(program, "cond")
    condition, body = loop.bodies
    assert [o.name for o in condition.operations] == ["lt"] and "sin" in [o.name for o in body.operations]
    assert [len(loop.entering(inner)) for inner in loop.bodies] == [len(inner.inputs) for inner in loop.bodies]
    assert [[o.name for o in inner.operations] for inner in branch.bodies] == [["mul"], ["cos"]]
    assert branch.entering(branch.bodies[0])[0][1] is loop.results[-1]


def test_passes():
    def step(w, x):
        loss = lambda w: jnp.sum(jax.checkpoint(lambda w: jnp.sin(x @ w))(w))
        return w - 0.1 * jax.grad(loss)(w)

    program = trace(jax.jit(step), jnp.ones((4, 4)), jnp.ones((2, 4)))
    assert [o.direction for o in named(program, "dot_general")] == ["recomputed", "backward"]
    assert {o.direction for o in named(program, "sub")} == {"update"}
    forward = trace(jax.value_and_grad(lambda w, x: jnp.sum(jnp.sin(x @ w))), jnp.ones((4, 4)), jnp.ones((2, 4)))
    assert [o.direction for o in named(forward, "dot_general")] == ["forward", "backward"]


def test_slices_of_manual_mode():
    @functools.partial(jax.shard_map, mesh=MESH, in_specs=P("data"), out_specs=P())
    def total(x):
        return lax.psum(jnp.sum(x), "data")

    program = trace(total, jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=NamedSharding(MESH, P("data"))))
    (enter,), (leave,) = named(program, ENTER), named(program, LEAVE)
    assert enter.operands[0].shape == (8, 6) and enter.results[0].shape == (2, 6)
    assert enter.operands[0].num_bytes == enter.results[0].num_bytes == 4 * 12
    assert program.results == [leave.results[0]] and program.mesh == {"data": 4, "model": 2}


def test_sizes_on_a_device_and_states():
    x = jax.ShapeDtypeStruct((8, 6), jnp.bfloat16, sharding=NamedSharding(MESH, P("data", "model")))
    program = trace(lambda x: jax.reshard(x, P(None, "model")), x)
    before, after = program.inputs[0], program.results[0]
    assert (before.local_shape, before.num_bytes) == ((2, 3), 12) and (after.local_shape, after.num_bytes) == (
        (8, 3),
        48,
    )
    assert before.state.sliced == ("data", "model") and after.state.words("ab") == "a b/model"


def test_arguments_are_described():
    layout = tr.Layout(tr.make_mesh(data=8), params={"embed": "data"}, compute={"batch": "data"})
    with layout:
        state = {"model": tr.abstract({"w": tr.ones({"embed": 8, "mlp": 4})}), "step": jnp.int32(0)}
        step = tr.named_jit(lambda state, x: ({**state, "step": state["step"] + 1}, x.sum()), donate=0)
        found = trace(step, state, tr.ones({"batch": 8, "pos": 2})).arguments
    assert [(a.name, a.kind, a.what, a.donated) for a in found] == [
        ("model.w", "parameters", "f32[embed/data mlp]", True),
        ("step", "batch", "i32[]", True),
        ("argument 1", "batch", "f32[batch/data pos]", False),
    ]


def test_what_is_made_of_parameters():
    def loss(w, x):
        scanned = lambda x, w: (jnp.tanh(x @ w.astype(x.dtype)), None)
        return jnp.sum(lax.scan(scanned, x, w)[0])

    program = trace(jax.grad(loss), jnp.ones((3, 4, 4)), jnp.ones((2, 4), jnp.bfloat16))
    weights = of_parameters(program)
    casts = [o for o in named(program, "convert_element_type") if o.direction == "forward"]
    assert casts and all(o.results[0] in weights for o in casts)
    assert not any(o.results[0] in weights for o in named(program, "dot_general", "tanh"))


def test_roles():
    def loss(w, x):
        w = jax.reshard(w, P(None, None, reduced={"data"}))
        return jnp.sum(jnp.tanh(x @ w))

    sharded = NamedSharding(MESH, P("data", None))
    w, x = (jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharded) for _ in "wx")
    program = trace(jax.grad(loss), w, x)
    found = roles(program)
    assert [found[o] for o in named(program, "reshard") if o.operands[0].shape] == ["weights", "gradients"]


def test_weights_are_still_weights_where_rows_of_them_are_picked():
    """By numbers that the program knows, as uneven stages of a pipeline pick their layers."""
    rows = np.array([0, 2, 2, 1])

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ jax.reshard(w.take(rows, axis=0), P(None, None))))

    w = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=NamedSharding(MESH, P(None, "data")))
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(MESH, P("data", None)))
    program = trace(jax.grad(loss), w, x)
    found = roles(program)
    gathers = [o for o in named(program, "reshard") if o.direction == "forward" and o.operands[0].shape == (4, 8)]
    assert [found[o] for o in gathers] == ["weights"]


def test_what_a_loop_carries_is_of_parameters_only_if_it_stays_so():
    def turns(w, x):
        passed = lax.scan(lambda w, _: (w * 2, None), w, length=3)[0]
        mixed = lax.scan(lambda w, x: (w + x, w), w, x)
        return passed, mixed

    program = trace(turns, jnp.ones(4), jnp.ones((3, 4)))
    passed, (mixed, stack) = program.results[0], program.results[1:]
    assert passed in of_parameters(program) and not {mixed, stack} & of_parameters(program)


def test_a_call_reads_an_argument_that_it_gets_twice_once():
    program = trace(lambda x: jax.jit(lambda a, b: jnp.sin(a) * jnp.cos(b))(x, x), jnp.ones(1024))
    (piece,) = work(program)
    assert piece.num_bytes == 2 * 4 * 1024


def test_what_is_the_same_in_all_turns_of_a_loop():
    def turns(x, w):
        x = lax.fori_loop(0, x[0, 0].astype(int), lambda _, x: x * w, x)  # a `while` loop: its end is not known
        return lax.scan(lambda x, s: (lax.cond(s > 0, lambda x: x * w, lambda x: x, x), None), x, jnp.ones(3))

    program = trace(turns, jnp.ones((4, 4)), jnp.ones((4, 4)))
    w = program.inputs[1]
    for loop in named(program, "while", "scan"):
        for body in loop.bodies:
            assert [value.fixed for value in body.inputs] == [value.outer is w for value in body.inputs]
        assert [value.outer for value in loop.bodies[-1].inputs if value.fixed] == [w]
    (choice,) = named(program, "cond")
    assert all(value.fixed for branch in choice.bodies for value in branch.inputs)


@pytest.mark.parametrize("looped", [False, True])
def test_what_repeats_a_number_is_not_read_from_memory(looped):
    """Zeros that a mask selects: JAX makes them outside of a loop that reads them, compilers where they are read."""

    def masked(x):
        zeros, where = jnp.zeros_like(x), x > 0
        once = lambda x: lax.select(where, x * 2, zeros)
        return lax.scan(lambda x, _: (once(x), None), x, length=5)[0] if looped else once(x)

    size, times = 4 * 64 * 64, 5 if looped else 1
    found = [piece for piece in work(trace(masked, jnp.ones((64, 64)))) if piece.times == times]
    mask = 64 * 64 * looped  # a byte each, made before the loop
    assert sum(piece.num_bytes for piece in found) == 2 * size + mask


def test_a_sum_that_is_repeated_for_another_pass_is_written_once():
    def loss(x):
        return (x / x.sum(1, keepdims=True)).sum()

    found = work(trace(jax.grad(loss), jnp.ones((64, 64))))
    assert sum(piece.num_bytes for piece in found) < 8 * 4 * 64 * 64
