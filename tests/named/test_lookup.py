import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis import Layout, make_mesh, reshard


@pytest.mark.slow
def test_positions_shared_by_a_sliced_batch():
    """A copied table looked up at positions without a batch: values and gradient are one device's."""
    table = jnp.arange(32.0).reshape(16, 2)
    ids = jnp.array([1, 5, 5], jnp.int32)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3, 2)), jnp.float32)

    def loss(table, x):
        rows = tr.take(table, "positions", tr.named(ids, "pos"))
        y = x + rows
        return (y * y).sum().array

    def copied(table, x):
        return loss(reshard("positions embed -> positions embed ~data", table), x)

    whole = jax.value_and_grad(loss)(tr.named(table, "positions embed"), tr.named(x, "batch pos embed"))
    with Layout(make_mesh(data=8), compute={"batch": "data"}):
        args = tr.shard(tr.named(table, "positions embed")), tr.shard(tr.named(x, "batch pos embed"))
        value, gradient = jax.jit(jax.value_and_grad(copied))(*args)
    np.testing.assert_allclose(value, whole[0], rtol=1e-6)
    np.testing.assert_allclose(gradient.array, whole[1].array, rtol=1e-5)


def test_numbers_without_a_zero():
    """Rows of other devices are zeros, and a sum: scales of narrow numbers have none."""
    table = jnp.asarray(2.0 ** np.arange(-4, 4), jnp.float8_e8m0fnu)
    with Layout(make_mesh(data=4, model=2), compute={"vocab": "model"}):
        rows = tr.take(tr.shard(tr.named(table, "vocab"), "compute"), "vocab", tr.named(np.int32([6, 1, 3]), "pos"))
    np.testing.assert_array_equal(np.asarray(rows).astype(np.float32), [4, 0.125, 0.5])


@pytest.mark.slow
def test_keys_are_looked_up_and_put():
    """Random keys have no zero either, and no cast."""

    def program(keys, ids):
        spread = tr.broadcast_to(keys, {"copy": 2, "word": 8})
        along, put = tr.take_along(keys, "word", ids.rename(pos="word")), keys.at["word", 0].set(keys["word", 1])
        found = tr.take(keys, "word", ids), along, put, keys.at["word", ids].set(keys["word", 1]), spread
        return [jax.random.key_data(k.array) for k in found]

    ids = tr.named(jnp.int32([6, 1, 3, 2, 7, 0, 4, 5]), "pos")
    alone = program(tr.random.split(jax.random.key(0), "word", 8), ids)
    with Layout(make_mesh(data=4, model=2), compute={"word": "model"}):
        keys = tr.random.split(jax.random.key(0), "word", 8)
        jax.tree.map(np.testing.assert_array_equal, jax.jit(program)(keys, ids), alone)


@pytest.mark.slow
def test_one_row_of_slices_is_sent_alone():
    x = tr.named(jnp.arange(64.0).reshape(2, 8, 4), "batch pos embed")
    params = {"pos": "model", "embed": "data"}
    with Layout(make_mesh(data=2, model=4), params, compute={"batch": "data", "pos": "model"}, strict=True):
        (row,) = tr.ledger(lambda x: x["pos", 2], tr.shard(x)).rows
        assert (row.kind, row.what) == ("all-reduce", "batch embed/data +model -> batch embed/data")
        there = tr.shard(x, "compute")
        for n in (5, -1):
            (row,) = tr.ledger(lambda x, n=n: x["pos", n], there).rows
            assert (row.kind, row.what) == ("all-reduce", "batch/data embed +model -> batch/data embed")
            np.testing.assert_array_equal(there["pos", n].array, np.asarray(x)[:, n])
        gradient = tr.named_jit(lambda x: tr.grad(lambda x: (x["pos", 5] ** 2.0).sum())(x))(there)
        np.testing.assert_array_equal(gradient.array, 2 * np.asarray(x) * (np.arange(8) == 5)[:, None])
    with Layout(make_mesh(model=8), compute={"pos": "model"}):
        scales = tr.shard(tr.named(jnp.asarray(2.0 ** np.arange(8), jnp.float8_e8m0fnu), "pos"), "compute")
        assert np.asarray(scales["pos", 3].array).astype(np.float32) == 8
        there = tr.shard(x, "compute")
        second = jax.hessian(lambda scale: ((there * scale)["pos", 2] ** 2.0).sum().array)  # which maps over the row
        np.testing.assert_allclose(second(1.0), 2 * (np.asarray(x)[:, 2] ** 2).sum())


def test_outside_of_jit_equal_lookups_are_compiled_once(caplog):
    with Layout(make_mesh(data=4, model=2), compute={"batch": "data", "vocab": "model"}):
        table = tr.shard(tr.ones({"vocab": 8, "embed": 4}), "compute")
        ids = tr.shard(tr.zeros({"batch": 4, "pos": 2}, jnp.int32), "compute")
        tr.take(table, "vocab", ids)
        with jax.log_compiles():
            tr.take(table, "vocab", ids)
    assert not [r for r in caplog.records if "ompil" in r.message]


OFTEN = 4096
LAYOUTS = ({}, {"batch": "data"}, {"batch": "data", "vocab": "model"}, {"batch": "data", "embed": "model"})


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("compute", LAYOUTS, ids=str)
def test_the_gradient_of_a_row_that_is_read_often_is_summed_in_float32(compute, dtype):
    """In bfloat16 a sum of ones ends at 256, in float16 at 2048."""
    ids = tr.named(jnp.full((8, OFTEN // 8), 3, jnp.int32), "batch pos")
    count = lambda table: tr.take(table, "vocab", ids).astype(jnp.float32).sum().array
    with Layout(make_mesh(data=4, model=2), compute=compute):
        table = tr.shard(tr.zeros({"vocab": 8, "embed": 4}, dtype))
        gradient = jax.jit(jax.grad(count))(table)
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(np.asarray(gradient, np.float32), OFTEN * (np.arange(8) == 3)[:, None] * np.ones(4))


def test_so_is_that_of_a_value_that_is_looked_up_along_aligned_names():
    ids = tr.named(jnp.full((2, OFTEN), 1, jnp.int32), "batch k")
    count = lambda x: tr.take_along(x, "vocab", ids).astype(jnp.float32).sum().array
    gradient = jax.grad(count)(tr.zeros({"batch": 2, "vocab": 3}, jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(gradient, np.float32), [[0, OFTEN, 0]] * 2)


def test_so_is_that_of_a_lookup_by_hand():
    ids = jnp.full((8, OFTEN // 8), 3, jnp.int32)

    @tr.shard_map
    def count(table: tr.bf16["vocab/model embed"], ids: tr.i32["batch/data pos"]) -> tr.f32["+data"]:
        rows = tr.take("vocab/model embed, batch/data pos -> batch/data pos embed +model", table, ids)
        rows = tr.reshard("batch/data pos embed +model -> batch/data pos embed", rows)
        return tr.einsum("batch/data pos embed -> +data", rows.astype(jnp.float32))

    with jax.set_mesh(make_mesh(data=4, model=2)):
        table = reshard("vocab embed -> vocab/model embed", jnp.zeros((8, 4), jnp.bfloat16))
        gradient = jax.jit(jax.grad(count))(table, reshard("batch pos -> batch/data pos", ids))
    np.testing.assert_array_equal(np.asarray(gradient, np.float32), OFTEN * (np.arange(8) == 3)[:, None] * np.ones(4))


def test_so_is_that_of_mapped_lookups():
    """Of one table at mapped positions, of mapped tables, and of both mapped twice."""
    ids = jnp.full((8, OFTEN // 8), 3, jnp.int32)
    rows = lambda table, ids: tr.take("vocab embed, pos -> pos embed", table, ids).astype(jnp.float32).sum()
    once = lambda table: jax.vmap(rows, (None, 0))(table, ids).sum()
    twice = lambda table: jax.vmap(jax.vmap(rows, (None, 0)), (0, None))(table, ids).sum()
    named = lambda table: tr.vmap(
        lambda ids: tr.take(tr.named(table, "vocab embed"), "vocab", ids).astype(jnp.float32).sum(), "batch"
    )(tr.named(ids, "batch pos")).sum().array  # fmt: skip
    right = OFTEN * (np.arange(8) == 3)[:, None] * np.ones(4)
    for loss, shape in ((once, (8, 4)), (named, (8, 4)), (twice, (2, 8, 4))):
        gradient = jax.jit(jax.grad(loss))(jnp.zeros(shape, jnp.bfloat16))
        np.testing.assert_array_equal(np.asarray(gradient, np.float32), np.broadcast_to(right, shape))


@pytest.mark.slow
def test_second_and_forward_derivatives_of_a_narrow_table():
    ids = tr.named(jnp.array([1, 1, 2], jnp.int32), "pos")
    table = tr.named(jnp.arange(8, dtype=jnp.bfloat16).reshape(4, 2), "vocab embed")
    loss = lambda t: (tr.take(t, "vocab", ids).astype(jnp.float32) ** 3).sum().array
    wide = lambda t: loss(t.astype(jnp.float32))
    along = tr.ones({"vocab": 4, "embed": 2}, jnp.bfloat16)
    for fn in (lambda f, t: jax.jvp(f, (t,), (along.astype(t.dtype),))[1],
               lambda f, t: jax.jvp(jax.grad(f), (t,), (along.astype(t.dtype),))[1].array,
               lambda f, t: jax.grad(lambda t: jax.grad(f)(t).astype(jnp.float32).sum().array)(t).array):  # fmt: skip
        got, right = fn(loss, table), fn(wide, table.astype(jnp.float32))
        np.testing.assert_allclose(np.asarray(got, np.float32), right, rtol=1e-2)


@pytest.mark.slow
def test_all_combinations_are_made_as_the_refusals_say():
    x, ones = tr.named(jnp.arange(12.0).reshape(3, 4), "a b"), tr.ones({"k": 2})
    ids, others = tr.named(jnp.int32([2, 0]), "k"), tr.named(jnp.int32([1, 3, 1]), "l")
    got = r"got i32\[k=2\] and i32\[l=3\] in indexing: rename one of them, or for all combinations "
    with pytest.raises(tr.NamesError, match=got + r'look up one after the other, x\["a", ids\]\["b", others\]'):
        x["a", ids, "b", others]
    np.testing.assert_array_equal(x["a", ids]["b", others], np.asarray(x)[np.ix_([2, 0], [1, 3, 1])])
    with pytest.raises(tr.NamesError, match="rename one of them, or for all combinations broadcast one to all names"):
        x.at["a", ids, "b", others].add(1.0)
    both = ids.broadcast_to({"k": 2, "l": 3})
    assert np.asarray(x.at["a", both, "b", others].add(1.0) - x).sum() == 6
    with pytest.raises(tr.NamesError, match="rename one of them, or broadcast one of them to all names"):
        tr.stack([ones, others], "s")


def test_a_table_of_no_rows_that_rests_in_slices_reads_zeros():
    ids = tr.from_numpy(np.zeros(4, np.int32), "pos")
    with tr.Layout(tr.make_mesh(data=4, model=2), params={"vocab": "data"}, compute={"pos": "data"}):
        table = tr.shard(tr.zeros({"vocab": 0, "embed": 2}))
        rows, gradient = tr.named_jit(
            lambda t: (tr.take(t, "vocab", ids), tr.grad(lambda t: tr.take(t, "vocab", ids).sum())(t))
        )(table)
        np.testing.assert_array_equal(rows, np.zeros((4, 2)))
        assert tr.typeof(gradient) == tr.typeof(table)
