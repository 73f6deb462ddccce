"""Tokens to experts and back on one device's slices: what an exchange moves, its rounds, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.nn.moe.emulated import ragged_all_to_all
from trellis.inspect import ledger
from trellis.mesh import make_mesh
from trellis.nn.moe import ExpertsError, exchange_experts, gather_experts, local_experts
from trellis.nn.moe.ragged import in_tiles

DEVICES, TOKENS, EMBED, COUNT, CHOICES = 4, 6, 3, 2, 2
EXPERTS = DEVICES * COUNT


def compute(rows, sizes, weights):
    """Expert e of a device scales by e + 1; the devices differ too. Rows of nobody become what is no number."""
    ends = jnp.cumsum(sizes)
    expert = (jnp.arange(rows.shape[0])[:, None] >= ends[None]).sum(1, dtype=jnp.float32)
    scale = jnp.where(expert < COUNT, expert + 1.0 + 10.0 * jax.lax.axis_index("x").astype(jnp.float32), jnp.nan)
    return rows * (scale * weights)[:, None]


def put(x):
    return jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), P("x")))


def tokens(load):
    """Each element encodes its device and place; `load` says whom tokens choose."""
    count = DEVICES * TOKENS
    x = jnp.arange(1.0, count * EMBED + 1).reshape(count, EMBED)
    ids = {
        "even": jnp.stack([jnp.arange(count) % EXPERTS, (jnp.arange(count) + 3) % EXPERTS], 1),
        "one device": jnp.tile(jnp.array([[2, 3]]), (count, 1)),
        "dropped": jnp.where(jnp.arange(count)[:, None] % 3 == 0, EXPERTS, jnp.tile(jnp.array([[7, 0]]), (count, 1))),
        "all dropped": jnp.full((count, 2), EXPERTS),
    }[load].astype(jnp.int32)
    weights = jnp.where(ids < EXPERTS, jax.random.uniform(jax.random.key(0), ids.shape), 0.0)
    return x, ids, weights


def wanted(x, ids, weights):
    scale = np.where(ids < EXPERTS, ids % COUNT + 1.0 + 10.0 * (ids // COUNT), 0.0)
    return x * (scale * weights).sum(1, keepdims=True), (scale * weights).sum(1, keepdims=True)


def program(how, mesh):
    specs = dict(mesh=mesh, in_specs=(P("x"),) * 3, out_specs=P("x"))
    return jax.shard_map(lambda *a: how(*a, compute, axes=("x",), count=COUNT), **specs)


WAYS = {
    "gather": gather_experts,
    "ragged": functools.partial(exchange_experts, ragged=True, slack=1.5),
    "ragged, many rounds": functools.partial(exchange_experts, ragged=True, slack=0.3),
    "slots": functools.partial(exchange_experts, ragged=False, slack=1.5),
    "slots, many rounds": functools.partial(exchange_experts, ragged=False, slack=0.3),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_token_finds_its_experts(way, monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    mesh = make_mesh(jax.devices()[:DEVICES], x=DEVICES)
    fn = program(WAYS[way], mesh)

    def loss(x, ids, weights):
        out = fn(x, ids, weights)
        return (out * jnp.arange(1.0, EMBED + 1)[None]).sum(), out

    run = jax.jit(jax.value_and_grad(loss, (0, 2), has_aux=True, allow_int=True))
    for load in ("even", "one device", "dropped", "all dropped"):
        with jax.set_mesh(mesh):
            (_, out), (d_x, d_weights) = run(*map(put, tokens(load)))
        x, ids, weights = map(np.asarray, tokens(load))
        expected, scale = wanted(x, ids, weights)
        np.testing.assert_allclose(out, expected, rtol=1e-6, err_msg=load)
        np.testing.assert_allclose(d_x, np.arange(1.0, EMBED + 1) * scale, rtol=1e-6, err_msg=load)
        each = np.where(ids < EXPERTS, ids % COUNT + 1.0 + 10.0 * (ids // COUNT), 0.0)
        pulled = each * (x * np.arange(1.0, EMBED + 1)).sum(1)[:, None]
        np.testing.assert_allclose(d_weights, pulled, rtol=1e-6, err_msg=load)


@pytest.mark.slow
def test_alone():
    x, ids, weights = tokens("even")

    def mine(rows, sizes, weights):
        expert = (jnp.arange(rows.shape[0])[:, None] >= jnp.cumsum(sizes)[None]).sum(1, dtype=jnp.float32)
        return rows * ((1 + expert) * weights)[:, None]

    out = local_experts(x, ids, weights, mine, count=EXPERTS)
    ids = np.asarray(ids)
    np.testing.assert_allclose(out, x * ((ids + 1.0) * np.asarray(weights)).sum(1)[:, None], rtol=1e-6)


@pytest.mark.parametrize(
    ("embed", "tile"),
    [(4096, (16, 256)), (7168, (8, 896)), (2560, (4, 640)), (2304, (2, 1152)), (1152, (1, 1152)), (2880, (1, 2880))],
)
def test_rows_travel_in_the_deepest_tiles_that_they_fill(embed, tile):
    assert jax.eval_shape(in_tiles, jax.ShapeDtypeStruct((3, embed), jnp.bfloat16)).shape == (3, *tile)


@pytest.mark.slow
def test_what_moves():
    """Of a gather all tokens; of an exchange at most a buffer's room, there and back, and the rest only if needed."""
    mesh = make_mesh(jax.devices()[:DEVICES], x=DEVICES)
    with jax.set_mesh(mesh):
        given = [put(a) for a in tokens("even")]
        moved = {way: ledger(program(how, mesh), *given) for way, how in WAYS.items()}
    rows = lambda way: [(row.kind, row.wire) for row in moved[way] if row.dtype.startswith("f") and not row.note]
    row, others = 4 * EMBED, DEVICES - 1
    weights = 4 * CHOICES * TOKENS * others
    scattered = ("reduce-scatter", row * TOKENS * others)
    assert rows("gather") == [("all-gather", row * TOKENS * others), ("all-gather", weights), scattered]
    room = 20  # 1.5 times the 12 choices of 6 tokens, in whole slots of 4 devices
    counted, *slots = [r for r in moved["slots"] if r.dtype.startswith("f")]
    assert (counted.kind, counted.wire, counted.times) == ("all-gather", weights, 1)
    size = row * room * others // DEVICES
    assert [(r.kind, r.wire, r.times) for r in slots] == [("all-to-all", size, times) for times in (1, 1, 1, 1)]
    assert [r.note for r in slots] == ["", "", *["once a turn of a while loop"] * 2]
    back = next(r for r in moved["ragged"] if r.what == "20 1 3 -> 12 1 3")
    assert back.wire == size and back.note == "at most: the sizes are known when it runs"


@pytest.mark.parametrize(
    ("how", "axis", "message"),
    [
        (
            gather_experts,
            "y",
            "Expert parallelism must use axes of the mesh.\n  seen:  'y' where the mesh has x\n  where: "
            "gather_experts\n  fix:   use one of these, or add it to the mesh",
        ),
        (
            functools.partial(exchange_experts, ragged=False, slack=0.0),
            "x",
            "`slack` must be more than 0.\n  seen:  slack=0.0\n  where: exchange_experts\n  fix:   use 1 for room for "
            "an even load, 1.5 for half as much more",
        ),
    ],
)
def test_refused(how, axis, message):
    mesh = make_mesh(jax.devices()[:DEVICES], x=DEVICES)
    fn = lambda *a: how(*a, compute, axes=(axis,), count=COUNT)
    with jax.set_mesh(mesh), pytest.raises(ExpertsError) as error:
        jax.eval_shape(jax.shard_map(fn, in_specs=(P("x"),) * 3, out_specs=P("x")), *map(put, tokens("even")))
    assert str(error.value) == message


def test_refused_outside():
    with jax.set_mesh(make_mesh(jax.devices()[:DEVICES], x=DEVICES)), pytest.raises(ExpertsError) as error:
        gather_experts(*tokens("even"), compute, axes=("x",), count=COUNT)
    assert str(error.value) == (
        "Tokens can be sent to their experts in manual mode only.\n  seen:  'x', which is not manual here\n  where: "
        "gather_experts\n  fix:   call it inside shard_map"
    )
