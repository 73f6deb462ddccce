"""What an index means: lists, masks, negative positions and those outside, alike on every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis.named import NamesError

LAYOUTS = [
    None,
    ("explicit", {}),
    ("explicit", {"w": "model"}),
    ("explicit", {"w": ("data", "model"), "b": "data"}),
    ("explicit", {"b": "data", "k": "model"}),
    ("auto", {"w": "model", "b": "data"}),
]


@pytest.fixture(params=LAYOUTS, ids=str)
def layout(request):
    if request.param is None:
        yield None
        return
    kind, compute = request.param
    with tr.Layout(tr.make_mesh(data=4, model=2, axis_type=kind), compute=compute) as layout:
        yield layout


def _table():
    return np.arange(32.0, dtype=np.float32).reshape(8, 4), "w b"


@pytest.mark.slow(but=1)
def test_lists_masks_and_arrays_select(layout):
    plain, names = _table()
    x = tr.named(jnp.asarray(plain), names)
    for key in ([0, 1], (0, 1), range(2), np.array([0, 1]), jnp.array([0, 1])):
        np.testing.assert_array_equal(x["w", key], plain[:2])
        assert x["w", key].names == ("w", "b")
    np.testing.assert_array_equal(x["w", []], plain[:0])
    mask = np.arange(8) > 2
    for key in (mask, jnp.asarray(mask), mask.tolist(), tr.named(mask, "w"), tr.arange(tr.Axis("w", 8)) > 2):
        np.testing.assert_array_equal(x["w", key], plain[3:])
    np.testing.assert_array_equal(x["w", np.zeros(8, bool)], plain[:0])


def test_masks_inside_jit_say_why_not(layout):
    x = tr.named(jnp.arange(8.0), "w")
    with pytest.raises(NamesError, match="can select only outside of jit.*where\\(mask, x, 0\\)"):
        jax.jit(lambda x: x["w", x > 2])(x)


@pytest.mark.slow(but=3)
def test_negative_positions_count_from_the_end(layout):
    plain, names = _table()
    x = tr.named(jnp.asarray(plain), names)
    np.testing.assert_array_equal(x["w", -1], plain[-1])
    np.testing.assert_array_equal(x["w", [-1, -8]], plain[[-1, -8]])
    for ids in (np.array([-1, 2], np.int32), jnp.array([-1, 2])):
        ids = tr.named(ids, "k")
        for look in (lambda x, ids: tr.take(x, "w", ids), lambda x, ids: x["w", ids]):
            np.testing.assert_array_equal(look(x, ids), plain[[-1, 2]])
            np.testing.assert_array_equal(jax.jit(look)(x, ids), plain[[-1, 2]])


@pytest.mark.slow(but=2)
def test_positions_outside(layout):
    """Refused where they are known, zeros where they are values of the program; nothing is written there."""
    plain, names = _table()
    x = tr.named(jnp.asarray(plain), names)
    for key in (8, -9, [0, 8], np.array([-9]), tr.named(np.array([8]), "k")):
        with pytest.raises(NamesError, match="a position must be inside its dimension.*use -8 to 7"):
            x["w", key]
        with pytest.raises(NamesError, match="a position must be inside its dimension"):
            x.at["w", key].add(1.0)
    ids = tr.named(jnp.array([8, 1, -9, -1]), "k")
    expected = np.stack([0 * plain[0], plain[1], 0 * plain[0], plain[-1]])
    for look in (lambda x, ids: tr.take(x, "w", ids), lambda x, ids: x["w", ids]):
        np.testing.assert_array_equal(jax.jit(look)(x, ids), expected)
        gradient = jax.jit(jax.grad(lambda x, look=look: look(x, ids).sum().array))(x)
        np.testing.assert_array_equal(gradient, np.isin(np.arange(8), (1, 7))[:, None] * np.ones((8, 4)))
    added = plain.copy()
    added[[1, 7]] += 1
    np.testing.assert_array_equal(jax.jit(lambda x, ids: x.at["w", ids].add(1.0))(x, ids), added)


@pytest.mark.slow(but=2)
def test_updates_by_sharded_ids(layout):
    plain, names = _table()
    ids = tr.named(jnp.array([1, 3, 3, 0]), "k")
    x = tr.named(jnp.asarray(plain), names)
    if layout is not None:
        x, ids = tr.shard((x, ids), "compute")
    expected = plain.copy()
    np.add.at(expected, [1, 3, 3, 0], 2.0)
    np.testing.assert_array_equal(x.at["w", ids].add(2.0), expected)
    np.testing.assert_array_equal(x.at["w", ids].get(), plain[[1, 3, 3, 0]])


@pytest.mark.slow(but=2)
def test_take_along_each_rows_own_positions(layout):
    plain, names = _table()
    ids = np.array([[0, 1, 2, 3], [7, 6, -1, 0]], np.int32)
    x = tr.named(jnp.asarray(plain), names)
    found = tr.take_along(x, "w", tr.named(jnp.asarray(ids), "k b"))
    np.testing.assert_array_equal(found.transpose(("k", "b")), np.take_along_axis(plain, ids, 0))


def test_a_layout_changes_no_slice(layout):
    plain, names = _table()
    x = tr.named(jnp.asarray(plain), names)
    for key in (slice(None), slice(1, 5), slice(None, None, -1), slice(6, 1, -2), slice(-3, None), slice(5, 2)):
        np.testing.assert_array_equal(x["w", key], plain[key])


@pytest.mark.slow
def test_manual_lookups():
    """In manual mode each device looks up what it has of the positions, in a table that is whole."""
    plain, names = _table()

    @tr.shard_map
    def rows(table: tr.f32["w b"], ids: tr.i32["k/data"]) -> tr.f32["k/data b"]:
        return tr.take("w b, k/data -> k/data b", table, ids)

    @tr.shard_map
    def sums(table: tr.f32["w/data b"], ids: tr.i32["k"]) -> tr.f32["k b"]:
        return tr.reshard("k b +data -> k b", tr.take("w/data b, k -> k b +data", table, ids))

    with tr.Layout(tr.make_mesh(data=8)):
        ids = np.array([-1, 0, 3, 3, 8, -9, 7, 1], np.int32)
        expected = np.where(((ids >= -8) & (ids < 8))[:, None], plain[ids % 8], 0)
        np.testing.assert_array_equal(rows(plain, ids), expected)
        np.testing.assert_array_equal(sums(plain, ids), expected)


@pytest.mark.parametrize("sizes", [{"data": 2, "model": 4}, {"data": 8, "model": 1}], ids=str)
def test_manual_lookups_along_names_that_both_have(sizes):
    """One value of each row: a target's logit, with the vocabulary in slices. Its gradient is where it was read."""

    def loss(logits, targets, weights):
        found = tr.take("k pos/data w/model batch, batch k x pos/data -> k pos/data x batch +model", logits, targets)
        found = tr.all_reduce("k pos/data x batch +model -> k pos/data x batch", found)
        return tr.all_reduce("+data -> ", tr.einsum("k pos/data x batch, k pos/data x batch -> +data", found, weights))

    @tr.shard_map
    def both(
        logits: tr.f32["k pos/data w/model batch"],
        targets: tr.i32["batch k x pos/data"],
        weights: tr.f32["k pos/data x batch"],
    ) -> tuple[tr.f32[""], tr.f32["k pos/data w/model batch"]]:
        return jax.value_and_grad(loss)(logits, targets, weights)

    rng = np.random.default_rng(0)
    logits, weights = (rng.normal(size=s).astype(np.float32) for s in [(3, 8, 12, 2), (3, 8, 5, 2)])
    targets = rng.integers(-14, 14, (2, 3, 5, 8)).astype(np.int32)  # from the end, too, and outside
    wanted, gradient = 0.0, np.zeros_like(logits)
    for b, k, x, p in np.ndindex(targets.shape):
        if -12 <= (at := targets[b, k, x, p]) < 12:
            wanted += logits[k, p, at, b] * weights[k, p, x, b]
            gradient[k, p, at, b] += weights[k, p, x, b]
    with tr.Layout(tr.make_mesh(**sizes)):
        got, got_gradient = jax.jit(both)(logits, targets, weights)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    np.testing.assert_allclose(got_gradient, gradient, rtol=1e-6)


def test_manual_lookups_slice_alike_what_both_have():
    @tr.shard_map
    def wrong(table: tr.f32["pos/data w"], ids: tr.i32["pos"]) -> tr.f32["pos/data"]:
        return tr.take("pos/data w, pos -> pos/data", table, ids)

    said = r"the table and the positions share must be sliced the same way, got 'pos/data' and 'pos', in .*reshard one"
    with tr.Layout(tr.make_mesh(data=8)), pytest.raises(tr.NotationError, match=said):
        wrong(np.ones((8, 3), np.float32), np.zeros(8, np.int32))


@pytest.mark.parametrize("method", ["multiply", "divide", "power"])
def test_factors_at_places_that_may_be_met_twice_have_no_derivative(method):
    update = lambda x: getattr(x.at["w", tr.named(np.array([0, 0]), "p")], method)(x["w", :2].rename(w="p"))
    update(tr.ones({"w": 4}))
    with pytest.raises(tr.NamesError, match=rf"got {method} of f32\[w=4\] at .*, in at\[\.\.\.\]\.{method}: read x"):
        jax.grad(lambda x: update(x).sum().array)(tr.ones({"w": 4}))


@pytest.mark.slow
def test_windows_of_sizes_that_mesh_axes_do_not_divide_compile_in_auto_mode():
    values = np.arange(8 * 8, dtype=np.float32).reshape(8, 8)
    parts = lambda x: [tr.pad(x["w", : 8 - i], {"w": (i, 0)}) for i in (1, 2)]
    joined = lambda x: [tr.concatenate((tr.zeros({"b": 8, "w": i}), x["w", : 8 - i]), "w") for i in (1, 2)]
    backward = lambda x: [tr.concatenate((x["w", 7:i:-1], tr.zeros({"b": 8, "w": i + 1})), "w") for i in (0, 1)]
    for fn in (parts, joined, backward):
        loss = lambda x, fn=fn: sum((i + 1) * (y**2.0).sum() for i, y in enumerate(fn(x)))
        expected = tr.value_and_grad(loss)(tr.named(values, "b w"))
        with tr.Layout(tr.make_mesh(data=2, model=4, axis_type="auto"), compute={"b": "data", "w": "model"}):
            found = tr.named_jit(tr.value_and_grad(loss))(tr.from_numpy(values, "b w"))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


@pytest.mark.slow
def test_an_update_takes_any_single_number(layout):
    plain, names = _table()
    x = tr.named(jnp.asarray(plain), names)
    for number in (2, 2.0, np.float32(2), np.float64(2), jnp.float32(2), jnp.int32(2), tr.named(2.0, "")):
        np.testing.assert_array_equal(x.at["w", 1].set(number), x.at["w", [1]].set(2.0))
    added = jax.jit(lambda x, number: x.astype(jnp.bfloat16).at["w", [1, 1]].add(number))(x, jnp.float32(0.5))
    assert added.dtype == jnp.bfloat16 and float(added["w", 1, "b", 0]) == plain[1, 0] + 1.0
    slope = jax.grad(lambda number: (x.at["w", 1:3].set(number) * x).sum().array)(jnp.float32(2))
    assert float(slope) == plain[1:3].sum()


def test_an_update_keeps_what_its_value_is(layout):
    plain, names = _table()
    x = tr.named(jnp.asarray(plain), names)
    for array, value, seen in (
        (x.astype(jnp.int32), 0.5, "0.5"),
        (x.astype(jnp.int32), jnp.float32(0.5), r"f32\[\]"),
        (x.astype(jnp.int32), float("inf"), "inf"),
        (x, 1j, "1j"),
        (x, x["w", 0].astype(jnp.complex64), r"c64\[b.*\]"),
        (x > 0, 1, "1"),
    ):
        with pytest.raises(tr.TypeMismatch, match=rf"an update must keep the dtype of its array, got {seen} for"):
            array.at["w", 1].set(value)
