"""Gradients of tables that are summed in one order, as on GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trellis as tr
from trellis.hardware.described import described_devices
from trellis.mesh.manual import take
from trellis.mesh.manual.row_sums import row_sums
from trellis.mesh.manual.take import rows_of
from trellis.plan import target
from trellis.plan.prepared import prepare
from trellis.recipes import load_run

COMPILED = jax.jit(row_sums, static_argnums=2)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    length=st.sampled_from([1, 2, 127, 128, 129, 300, 513]),
    count=st.sampled_from([1, 2, 40, 300]),
    kinds=st.sampled_from([1, 2, 3, 50, 1000]),
    seed=st.integers(0, 99),
)
def test_sums_of_rows(length, count, kinds, seed):
    """Of one number or many, that end within a block, at its end, or go on through several, and out of range."""
    rng = np.random.default_rng(seed)
    ids, rows = rng.integers(-1, kinds, length), rng.integers(-9, 9, (length, 3))
    expected = np.zeros((count, 3))
    for number, row in zip(ids, rows):
        if 0 <= number < count:
            expected[number] += row
    found = COMPILED(jnp.array(ids), jnp.array(rows, jnp.bfloat16), count)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("axis", [0, 1])
def test_every_derivative_of_a_lookup(monkeypatch, axis, dtype):
    """The first, forward, second, and mapped over positions, over tables and over both, beside scattered sums."""
    rng = np.random.default_rng(0)
    table, ids = jnp.array(rng.integers(-2, 3, (6, 8, 3)), dtype), jnp.array(rng.integers(-7, 9, (2, 70)))
    tables = jnp.stack([table, 2 * table], 1)

    def found(in_order: bool):
        monkeypatch.setattr(take, "adds_in_any_order", lambda x: in_order)
        loss = lambda table, ids: jnp.sum(rows_of(table, ids, axis).astype(jnp.float32) ** 2)
        pull = jax.grad(loss)
        many = lambda table: jnp.sum(jax.vmap(lambda ids: rows_of(table, ids, axis).astype(jnp.float32) ** 2)(ids))
        return [
            jax.jit(pull)(table, ids),
            jax.jvp(lambda t: pull(t, ids), (table,), (table,))[1],
            jax.grad(lambda t: jnp.sum(pull(t, ids).astype(jnp.float32) ** 2))(table),
            jax.vmap(pull, (None, 0))(table, ids),
            jax.vmap(pull, (1, None))(tables, ids),
            jax.vmap(pull, (1, 0))(tables, ids),
            jax.grad(many)(table),
            rows_of(table, ids, axis),
        ]

    for one, other in zip(found(True), found(False), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{}, {"batch": "data"}, {"batch": "data", "vocab": "model"}, {"embed": "model"}], ids=str
)
def test_on_every_layout(monkeypatch, layout):
    rng = np.random.default_rng(1)
    values, ids = rng.integers(-2, 3, (12, 4)), rng.integers(-13, 14, (4, 60))

    def gradient():
        table, places = tr.named(jnp.array(values, jnp.float32), "vocab embed"), tr.named(jnp.array(ids), "batch pos")
        loss = lambda table: (tr.take(table, "vocab", places) ** 2).sum().array
        return np.asarray(jax.jit(jax.grad(loss))(table).array)

    expected = gradient()
    monkeypatch.setattr(take, "adds_in_any_order", lambda x: True)
    with tr.Layout(tr.make_mesh(data=4, model=2), compute=layout, params={"vocab": "data"}):
        np.testing.assert_array_equal(gradient(), expected)
    np.testing.assert_array_equal(gradient(), expected)


@pytest.mark.slow
def test_a_table_in_slices_whose_rows_are_whole(monkeypatch):
    """As that of positions, whose width rests in slices: its gradient has the table's own type."""
    monkeypatch.setattr(take, "adds_in_any_order", lambda x: True)
    places = tr.named(jnp.arange(6).reshape(2, 3) % 4, "batch pos")
    looked_up = {"": tr.take, "mapped": tr.vmap(lambda table, _, ids: tr.take(table, "vocab", ids), "batch")}
    with tr.Layout(tr.make_mesh(data=4, model=2), compute={}, params={"embed": "data"}):
        table = tr.shard(tr.ones({"vocab": 5, "embed": 8}))
        for lookup in looked_up.values():
            found = jax.jit(jax.grad(lambda table, lookup=lookup: lookup(table, "vocab", places).sum().array))(table)
            assert tr.typeof(found) == tr.typeof(table)
            np.testing.assert_array_equal(np.asarray(found)[:, 0], [2, 2, 1, 1, 0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "on"),
    [("llama_8b", "8xH100"), ("gpt2_small", "8xH100"), ("gpt_oss_20b", "8xH100"), ("qwen3_30b_a3b", "8xH100")],
)
def test_no_step_on_gpus_adds_what_it_scatters(recipe, on):
    """Wherever it does, its gradient has other bits each time it is made."""
    where = target(on)
    program = prepare(load_run(recipe, {}), where, described_devices(where)).traced()
    found = [(o.name, o.params["unique_indices"]) for o in program.walk() if o.name.startswith("scatter")]
    assert found and {*found} == {("scatter", True)}
