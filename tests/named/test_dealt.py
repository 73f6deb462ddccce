"""What goes by the order of `pos` where context parallelism deals positions out (`Layout.dealt`): it is right, or
refused, never that of other positions."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis.inspect import collectives
from trellis.mesh.dealing import deal_slices, undeal
from trellis.mesh.reshard import ReshardError
from trellis.named.axis import NamesError
from trellis.named.dealing import deal

X = np.arange(2 * 16 * 3, dtype=np.float32).reshape(2, 16, 3)
POS = tr.Axis("pos", 16)
TABLE = lambda: tr.named(np.linspace(0, 1, 16).astype(np.float32), "pos")
MASK = lambda: tr.outer(tr.greater_equal, tr.arange(POS), tr.arange(POS).rename(pos="key_pos")).astype("float32")
RIGHT = {
    "arange": lambda x: x * tr.arange(POS).astype("float32"),
    "a range of its own": lambda x: x * tr.arange(POS, start=3, step=2).astype("float32"),
    "linspace": lambda x: x + tr.linspace(POS),
    "one_hot": lambda x: x + tr.dot(tr.one_hot(tr.named(np.int32(12), ()), POS), x, over="pos"),
    "a table from outside": lambda x: x + tr.named(np.linspace(0, 1, 16).astype(np.float32), "pos"),
    "a table that is put there": lambda x: x + tr.shard(TABLE(), "compute"),
    "a table at rest": lambda x: x + tr.shard(TABLE()),
    "a table that is settled": lambda x: x + tr.settle(TABLE()),
    "a mask by hand": lambda x: tr.dot(MASK(), x.rename(pos="key_pos"), over="key_pos"),
    "one position after the other": lambda x: tr.map(lambda x, at: x * at.astype("float32"), "pos")(x, tr.arange(POS)),
    "in order": lambda x: tr.in_order(lambda x: tr.cumsum(x, "pos"), x),
}
REFUSED = {
    "indexing": lambda x: x["pos", tr.named(np.array([3]), "some")],
    "one index": lambda x: x["pos", 3],
    "take": lambda x: tr.take(x, "pos", jnp.int32(3)),
    "take_along": lambda x: tr.take_along(x, "pos", tr.named(np.zeros((2, 2), np.int32), "batch some")),
    "an update": lambda x: x.at["pos", jnp.int32(3)].set(0.0),
    "rename": lambda x: x.rename(pos="other"),
    "rename to it": lambda x: tr.named(np.ones(16, np.float32), "other").rename(other="pos"),
    "split_axis": lambda x: x.split_axis("pos", {"chunk": 4, "i": 4}),
    "rearrange": lambda x: tr.rearrange(x, "batch pos=(chunk i) embed -> batch chunk i embed", i=4),
    "merge_axes": lambda x: x.merge_axes(("batch", "pos"), "row"),
    "argmax": lambda x: tr.argmax(x, "pos"),
    "cumsum": lambda x: tr.cumsum(x, "pos"),
    "a lift along": lambda x: tr.lift_along(lambda a, axis: a - jnp.flip(a, axis))(x, "pos"),
    "a lift along slices": lambda x: tr.lift_along(lambda a, axis: jnp.sin(a), gather=False)(x, "pos"),
    "a lifted reduction": lambda x: tr.lift_reduction(lambda a, axis: a.sum(axis))(x, "pos"),
    "a lifted reduction of slices": lambda x: tr.lift_reduction(lambda a, axis: a.sum(axis), gather=False)(x),
    "roll": lambda x: tr.roll(x, 1, "pos"),
    "arange of keys": lambda x: tr.arange(tr.Axis("key_pos", 16)),
    "tril": lambda x: tr.tril(tr.ones({"pos": 16, "key_pos": 16}), "pos", "key_pos"),
    "an array that JAX made": lambda x: x + tr.named(jnp.arange(16.0), "pos"),
    "a table of keys": lambda x: x.rename(pos="key_pos") + tr.named(np.ones(16, np.float32), "key_pos"),
}


@pytest.fixture
def layout():
    layout = tr.Layout(tr.make_mesh(jax.devices()[:4], c=4), compute={"pos": "c"})
    with layout:
        yield layout


@pytest.mark.slow
def test_what_comes_from_the_host_is_dealt_out(layout):
    """Each device gets the positions that attention and `arange` take its slice for."""
    with layout.with_dealt(("c",)):
        x = tr.from_numpy(X, "batch pos embed")
        total = tr.named_jit(lambda x: (x * tr.arange(POS).astype("float32")).sum())(x)
    assert float(total) == (X * np.arange(16)[:, None]).sum()
    np.testing.assert_array_equal(undeal(x.array, 4), X)
    assert tr.from_numpy(X, "batch pos embed").array.tolist() == X.tolist()


def test_values_that_leave_for_the_host_are_in_natural_order(layout):
    """As NumPy's, printed, as lists and pickled; the way back deals them out once."""
    with layout.with_dealt(("c",)):
        x = tr.named_jit(lambda x: x * 2)(tr.from_numpy(X, "batch pos embed"))
        np.testing.assert_array_equal(np.asarray(x), 2 * X)
        assert x.tolist() == (2 * X).tolist() and repr(x).endswith(str(2 * X))
        for back in (tr.named(np.asarray(x), "batch pos embed"), pickle.loads(pickle.dumps(x)), copy.deepcopy(x)):
            np.testing.assert_array_equal(np.asarray(x + back), 4 * X)
        assert (np.asarray(x.transpose("pos batch embed"))[:, 0] == 2 * X[0]).all()
        np.testing.assert_array_equal(np.asarray(tr.named(X, "batch pos embed")), X)
        assert np.asarray(x["embed", :0]).shape == (2, 16, 0)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", RIGHT)
def test_it_is_right(layout, kind, jit):
    fn = tr.named_jit(RIGHT[kind]) if jit else RIGHT[kind]
    x = tr.shard(tr.named(X, "batch pos embed"), "compute")
    wanted = tr.named_jit(RIGHT[kind])(x).transpose("batch pos embed")
    with layout.with_dealt(("c",)):
        found = fn(deal(x)).transpose("batch pos embed")
    np.testing.assert_allclose(undeal(np.asarray(found.array), 4, 1), wanted.array, rtol=1e-6)


@pytest.mark.parametrize("kind", REFUSED)
def test_it_is_refused(layout, kind):
    x = tr.shard(tr.named(X, "batch pos embed"), "compute")
    REFUSED[kind](x)
    with layout.with_dealt(("c",)), pytest.raises(NamesError, match="dealt out"):
        REFUSED[kind](deal(x))


def test_what_it_says(layout):
    x = tr.shard(tr.named(X, "batch pos embed"), "compute")
    with layout.with_dealt(("c",)):
        with pytest.raises(NamesError) as error:
            deal(x).rename(pos="p")
        assert str(error.value) == (
            "rename depends on the order of 'pos', which is dealt out over devices here, got f32[batch=2 pos/c=16 "
            "embed=3]: write it as trellis.in_order(f, x), or train with layout.context exchange, which keeps "
            "positions in order"
        )
        with pytest.raises(NamesError) as error:
            tr.arange(tr.Axis("key_pos", 16))
        assert str(error.value) == (
            "positions of keys that are dealt out must be made from those of queries, got 'key_pos=16', in arange: "
            "make it with 'pos' and write .rename(pos='key_pos')"
        )
        with pytest.raises(NamesError) as error:
            tr.arange(tr.Axis("pos", 12))
        assert str(error.value) == (
            "positions dealt out over 4 slices must split into two pieces for each, got 'pos=12', in arange: use a "
            "length that is divisible by 8"
        )


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("mode", ["explicit", "auto"])
def test_what_a_compiled_program_is_given_is_dealt_out(mode):
    """As eagerly, from the host or from one device."""
    given = np.arange(16, dtype=np.float32)
    less = lambda x: x - tr.arange(POS, dtype=jnp.float32)
    mesh = tr.make_mesh(jax.devices()[:4], axis_type=mode, c=4)
    with tr.Layout(mesh, compute={"pos": "c"}, dealt=("c",)):
        for x in (given, jax.device_put(given, jax.devices()[0])):
            x = tr.named(x, "pos")
            assert not np.asarray(tr.named_jit(less)(x)).any() and not np.asarray(less(x)).any()


def test_in_auto_mode_values_are_in_order_and_arrays_of_unknown_order_are_refused():
    mesh = tr.make_mesh(jax.devices()[:4], axis_type="auto", c=4)
    with tr.Layout(mesh, compute={"pos": "c"}, dealt=("c",)):
        x = tr.from_numpy(X, "batch pos embed")
        assert x.array[0, :, 0].tolist() != X[0, :, 0].tolist()
        for seen in (np.asarray(x), tr.named_jit(lambda x: x)(x).tolist(), pickle.loads(pickle.dumps(x)).array):
            np.testing.assert_array_equal(seen, X)
        with pytest.raises(NamesError, match="the order of an array's positions must be known, got f32"):
            tr.arange(POS) + tr.named(jnp.arange(16.0), "pos")


def test_a_table_from_outside_is_not_moved_by_a_text(layout):
    with layout.with_dealt(("c",)), pytest.raises(ReshardError) as error:
        tr.reshard("pos -> pos/c", TABLE())
    assert str(error.value) == (
        "an array with dealt-out positions must be placed before it is resharded, got 'pos' of one on no mesh, in "
        "reshard('pos -> pos/c'): write shard(x, 'compute') first"
    )


def test_numbers_of_positions_are_made_where_they_are(layout):
    """Nothing is moved to deal them out."""
    with layout.with_dealt(("c",)):
        made = tr.named_jit(lambda: (tr.arange(POS), tr.linspace(POS), tr.named(np.arange(16), "pos") + 1))
        assert not tr.ledger(made).rows
        assert tr.typeof(made()[0]) == "i32[pos/c=16]"


def test_pieces_that_every_device_keeps_are_not_sent():
    """Of two devices each keeps the first half of what it has, and sends the second."""
    mesh = tr.make_mesh(jax.devices()[:4], b=2, a=2)
    x = jax.device_put(np.arange(8), jax.NamedSharding(mesh, jax.P("a")))
    deals = lambda x: jax.shard_map(lambda x: deal_slices(x, ("a",), 0), out_specs=jax.P("a"))(x)
    with jax.set_mesh(mesh):
        compiled = jax.jit(deals).lower(x).compile()
    assert [(row.kind, row.axes) for row in collectives(compiled, mesh)] == [("permute", ("a",))]
    assert compiled(x).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
