"""Parameters gathered before a loop: one gather and one scatter of each, and the numbers of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr

LAYOUTS = {
    "fsdp": ({"data": 8}, {"embed": "data", "state": "data"}, {"batch": "data"}),
    "copies": ({"replica": 2, "data": 4}, {"embed": "data", "state": "data"}, {"batch": "replica/data"}),
    "two dimensions": ({"data": 4, "data_y": 2}, {"embed": "data", "state": "data_y"}, {"batch": "data/data_y"}),
    "tensor": ({"data": 4, "model": 2}, {"embed": "data", "state": "model"}, {"batch": "data", "state": "model"}),
}


def recurrence(ahead: bool):
    """The mean of a recurrence along `pos` whose body reads two parameters, and its gradients."""

    def total(weights, start, xs):
        weights = tr.gathered(weights) if ahead else weights

        def step(h, x):
            on = tr.rename(tr.dot(h, weights["on"], over="state"), {"next": "state"})
            h = tr.tanh(tr.dot(x, weights["in"], over="embed") + on)
            return h, (h.astype(jnp.float32) ** 2.0).sum("state")

        return tr.scan(step, "pos")(start, xs)[1].mean().array

    return jax.value_and_grad(total)


def values(dtype) -> tuple:
    normal = lambda seed, **axes: tr.random.normal(jax.random.key(seed), axes).astype(dtype)
    weights = {"in": normal(0, embed=16, state=8), "on": normal(1, state=8, next=8)}
    return jax.tree.map(lambda x: x * 0.3, weights), normal(2, batch=8, state=8), normal(3, batch=8, pos=6, embed=16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("where", LAYOUTS)
def test_numbers_are_one_devices_and_each_moves_once(where, dtype):
    sizes, params, compute = LAYOUTS[where]
    wanted = recurrence(ahead=False)(*values(dtype))
    with tr.Layout(tr.make_mesh(**sizes), params=params, compute=compute):
        weights, *others = values(dtype)
        given = tr.shard(weights), *tr.shard(others, "compute")
        found = tr.named_jit(recurrence(ahead=True))(*given)
        rows = tr.ledger(recurrence(ahead=True), *given)
        moved = [row for row in rows if row.payload > 8 and "batch" not in row.what]
        assert moved and {row.times for row in moved} == {1}, str(rows)
        sent = lambda ahead: sum(row.wire * row.times for row in tr.ledger(recurrence(ahead), *given))
        assert sent(ahead=True) < sent(ahead=False)
    near = dict(rtol=2e-5, atol=1e-6) if dtype == jnp.float32 else dict(rtol=0.05, atol=2e-3)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.float32(one), np.float32(other), **near)


def test_without_anything_to_gather_a_tree_stays():
    weights, *_ = values(jnp.float32)
    assert tr.gathered(weights) is weights
    with tr.Layout(tr.make_mesh(data=8, axis_type="auto"), params={"embed": "data"}, compute={"batch": "data"}):
        sliced = tr.shard(weights)
        stays = tr.gathered(sliced | {"count": 3})
        assert stays["in"].array.sharding == sliced["in"].array.sharding and stays["count"] == 3


@pytest.mark.slow
def test_names_are_names():
    with tr.Layout(tr.make_mesh(data=8), params={"embed": "data"}, compute={"batch": "data"}):
        weights = tr.shard(values(jnp.float32)[0])
        with pytest.raises(tr.NamesError, match="gathered takes names, got 3, in gathered: pass 'batch', or another"):
            tr.gathered(weights, 3)
        with pytest.raises(tr.NamesError, match="a name must be one word, got 'a b'"):
            tr.gathered(weights, ["a b"])
        assert str(tr.typeof(tr.gathered(weights)["in"])) == "f32[embed=16 state=8 ~data]"
