"""Where values lie that the compiler places, by what it is told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import trellis as tr
from trellis.inspect.compiled import collectives, products
from trellis.inspect.work import work
from trellis.program import trace

MESH = tr.make_mesh(data=4, model=2, axis_type="auto")


def placed(shape, *dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, P(*dims)))


def constrained(x, *dims):
    return lax.with_sharding_constraint(x, NamedSharding(MESH, P(*dims)))


def lies(fn, *args):
    """The slices of a program's results."""
    return [value.placed and value.placed.axes for value in trace(fn, *args).results]


X, W, Y = placed((8, 16), "data", None), placed((16, 6), None, "model"), placed((16, 16))
DATA, MODEL, WHOLE = ("data",), ("model",), ()


def branch(x):
    return lax.cond(x[0, 0] > 0, lambda x: x * 2, lambda x: jnp.zeros_like(x), x)


def accumulated(x):
    """The sum begins whole, and is sliced from the first turn on."""
    return lax.scan(lambda total, row: (total + row, row.sum()), jnp.zeros(16), constrained(x, None, "model"))


def handed_on(x, y):
    """A turn slices the first carry, the second is made of the first, and so on."""
    turn = lambda c: (constrained(jnp.tanh(c[0]), "data"), c[0] + 1, c[1] * 2, c[2] @ y)
    return lax.scan(lambda c, _: (turn(c), None), (x, x, x, x), length=8)[0]


def handed_on_while(x, y):
    turn = lambda c: (constrained(jnp.tanh(c[0]), "data"), c[0] + 1, c[1] * 2, c[2] @ y)
    return lax.while_loop(lambda c: c[0][0, 0] < 3, turn, (x, x, x, x))


def repeated(x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x))


def by_hand(x, w):
    """A `shard_map` says where it leaves its results."""
    specs = {"in_specs": (P("data"), P(None, "model")), "out_specs": (P("data", "model"), P("model"))}
    return jax.shard_map(lambda x, w: (x @ w, w.sum(0)), mesh=MESH, **specs)(x, w)


def partly_by_hand(x):
    """The slices along a manual mesh axis are whole inside; those along one that is left stay."""
    program = lambda x: (lax.psum(jnp.sin(x).sum(1), "model"), jnp.cos(x))
    specs = {"in_specs": P(None, "model"), "out_specs": (P(), P(None, "model"))}
    return jax.shard_map(program, mesh=MESH, axis_names={"model"}, **specs)(x)


def test_what_is_pending_at_the_end_is_summed_there():
    """At the end of a program, and of each turn of a loop that hands it on."""
    x, w = placed((8, 16), "data", "model"), placed((3, 16, 16), None, "model", None)
    (row,) = tr.ledger(lambda x, w: lax.scan(lambda x, w: (x @ w, None), x, w)[0], x, w)
    assert (row.axis, row.times, row.note) == ("model", 3, "the compiler chooses")
    for fn in (lambda x, w: x @ w[0], lambda x, w: w.sum(1)):
        assert collectives(jax.jit(fn).lower(x, w).compile(), MESH).per_axis() == tr.ledger(fn, x, w).per_axis() != {}


def test_what_is_sliced_by_hand_is_summed_once():
    x = placed((8, 16), "data", "model")
    (row,) = tr.ledger(partly_by_hand, x)
    assert (row.kind, row.axis, row.payload) == ("all-reduce", "model", 2 * 4)
    with jax.set_mesh(MESH):
        compiled = jax.jit(partly_by_hand).lower(x).compile()
    assert collectives(compiled, MESH).total() == row.total


@pytest.mark.parametrize(
    ("fn", "args", "wanted"),
    [
        (partly_by_hand, (placed((8, 16), "data", "model"),), [(DATA,), (DATA, MODEL)]),
        (lambda x, w: jnp.sin(x) @ w, (X, W), [(DATA, MODEL)]),
        (lambda x: constrained(x.T * 2, "model", None), (X,), [(MODEL, WHOLE)]),
        (lambda x: jnp.sort(x, axis=1), (X,), [(DATA, WHOLE)]),
        (lambda x: lax.top_k(x, 3), (X,), [(WHOLE, WHOLE)] * 2),  # compilers gather what they look through
        (branch, (X,), [(DATA, WHOLE)]),
        (lambda x: lax.cond(x[0, 0] > 0, jnp.zeros_like, lambda x: x * 2, x), (X,), [(DATA, WHOLE)]),
        (accumulated, (X,), [(MODEL,), (WHOLE,)]),
        (handed_on, (Y, Y), [(DATA, WHOLE)] * 4),
        (handed_on_while, (Y, Y), [(DATA, WHOLE)] * 4),
        (repeated, (X,), [(), (DATA, WHOLE)]),
        (
            lambda x: lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x * 2, x * 0 + 1),
            (placed((2, 3)),),
            [(WHOLE, WHOLE)],
        ),
        (by_hand, (X, W), [(DATA, MODEL), (MODEL,)]),
        (jax.jit(jax.remat(lambda x: jnp.cos(x)[:, None])), (X,), [(DATA, WHOLE, WHOLE)]),
        (lambda x, w: jax.grad(lambda w: jnp.sin(x @ w).sum())(w), (X, W), [(WHOLE, MODEL)]),
        (lambda x: x[:, 3:7], (X,), [(DATA, WHOLE)]),
        (lambda x: jnp.concatenate([x, jnp.zeros((8, 2))], axis=1), (X,), [(DATA, WHOLE)]),
        (lambda x: lax.split(x, (4, 12), axis=1), (X,), [(DATA, WHOLE)] * 2),
        (lambda x: lax.dynamic_slice(x, (0, 1), (8, 4)), (X,), [(DATA, WHOLE)]),
    ],
)
def test_results_lie_where_arguments_and_constraints_put_them(fn, args, wanted):
    with jax.set_mesh(MESH):
        assert lies(fn, *args) == wanted


def test_what_turns_hand_on_is_computed_in_slices():
    """As in the compiled program, by its operations."""
    with jax.set_mesh(MESH):
        (found,) = (w for w in work(trace(handed_on, Y, Y)) if w.kind == "product")
        (made,) = products(jax.jit(handed_on).lower(Y, Y).compile())
    assert found.flops == made.flops == 2 * 16**3 // 4


def test_sizes_on_a_device_are_those_of_the_slices():
    """Of what the compiler makes of a program, the results are as large."""

    def fn(x, w):
        stacked, _ = lax.scan(lambda x, w: (constrained(jnp.tanh(x @ w) @ w.T, "data", None), None), x, w)
        return stacked, constrained(w * 2, None, None, "model")

    args = placed((8, 16), "data", None), placed((3, 16, 6), None, None, "model")
    with jax.set_mesh(MESH):
        compiled = jax.jit(fn).lower(*args).compile()
        program = trace(fn, *args)
    shapes = [s.shard_shape(v.shape) for s, v in zip(compiled.output_shardings, program.results, strict=True)]
    assert [value.local_shape for value in program.results] == shapes == [(2, 16), (3, 16, 3)]
    assert [value.num_bytes for value in program.results] == [128, 576]
    products = [o.results[0].local_shape for o in program.walk() if o.name == "dot_general"]
    assert products == [(2, 3), (2, 16)]


def test_in_other_modes_types_say_it():
    explicit = tr.make_mesh(data=4, model=2)
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(explicit, P("data", None)))
    program = trace(lambda x: jnp.sin(x), x)
    assert program.results[0].placed is None and program.results[0].local_shape == (2, 16)
    assert trace(jnp.sin, np.ones(3, np.float32)).results[0].placed is None
