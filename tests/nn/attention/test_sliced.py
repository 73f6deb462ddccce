"""Attention over positions in slices: every kind, mask and placement gives one device's values and gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trellis.inspect import ledger
from trellis.mesh import Layout, make_mesh
from trellis.mesh.dealing import deal
from trellis.mesh.meshes import MeshError
from trellis.named import NamesError, named
from trellis.nn.attention import AttentionError, attend, dot_product_attention, further, mosaic
from trellis.nn.attention.pattern import Pattern
from trellis.nn.attention.sharded import PlacementError, placement_of
from trellis.nn.attention.sliced import program
from trellis.nn.attention.sliced.attention import tiled_attention
from trellis.nn.attention.sliced.program import Sliced
from trellis.nn.attention.splash import SplashTiles

BATCH, POS, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 4, 2, 8
QUERY, KEY = "batch pos heads head_dim", "batch key_pos kv_heads head_dim"

# Sizes of mesh axes, `compute`, and the kind of each axis of positions. Pieces are 4 (of 8 devices), 8 or 16 positions.
KINDS = {
    "ring": ({"a": 4}, {"pos": "a"}, {"a": "ring"}),
    "ring of 8": ({"a": 8}, {"pos": "a"}, {"a": "ring"}),
    "gather": ({"a": 4}, {"pos": "a"}, {}),
    "exchange": ({"a": 2}, {"pos": "a"}, {"a": "exchange"}),
    "exchange, few key heads": ({"a": 4}, {"pos": "a"}, {"a": "exchange"}),
    "exchange, key heads whole": ({"a": 2, "model": 2}, {"heads": "model", "pos": "a"}, {"a": "exchange"}),
    "exchange, key heads by name": ({"a": 2}, {"pos": "a", "heads": "a", "kv_heads": "a"}, {"a": "exchange"}),
    "ring, key heads by name": ({"a": 2}, {"pos": "a", "heads": "a", "kv_heads": "a"}, {"a": "ring"}),
    "ring, gather": ({"b": 2, "a": 4}, {"pos": ("a", "b")}, {"a": "ring"}),  # not in the mesh's order
    "ring, gather of more": ({"a": 2, "b": 4}, {"pos": ("a", "b")}, {"a": "ring", "b": "gather"}),
    "ring, exchange": ({"a": 4, "b": 2}, {"pos": ("a", "b")}, {"a": "ring", "b": "exchange"}),
    "ring of both": ({"b": 2, "a": 2}, {"pos": ("a", "b")}, {"a": "ring", "b": "ring"}),
    "gather, exchange": ({"a": 4, "b": 2}, {"pos": ("a", "b")}, {"b": "exchange"}),
    "ring, data, heads": (
        {"data": 2, "a": 2, "model": 2},
        {"batch": "data", "heads": "model", "kv_heads": "model", "pos": "a"},
        {"a": "ring"},
    ),
    "ring, more heads than key heads": ({"a": 2, "model": 4}, {"heads": "model", "pos": "a"}, {"a": "ring"}),
}
MASKS = {
    "causal": {},
    "documents": {"documents": True},
    "window in a piece": {"window": 3},
    "window over pieces": {"window": 23, "documents": True},
    "cap": {"logit_softcap": 2.0},
    "all": {"causal": False},
    "all, documents": {"causal": False, "documents": True},
    "window both ways": {"causal": False, "window": 9},
}
CASES = [("ring, gather", mask) for mask in MASKS]
CASES += [("ring", mask) for mask in ("window in a piece", "all", "cap")]
CASES += [(kind, "documents") for kind in KINDS if kind not in ("ring", "ring, gather")]
CASES += [(kind, "window over pieces") for kind in ("gather", "exchange", "ring, exchange", "ring, data, heads")]


@functools.cache
def arrays(kv_heads: int = KV_HEADS):
    """Queries, keys, values, a gradient, and documents of uneven lengths."""
    random = np.random.default_rng(0)
    shapes = [(BATCH, POS, heads, HEAD_DIM) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    ids = np.cumsum(random.random((BATCH, POS)) < 0.06, axis=1, dtype=np.int32)
    return *(random.normal(size=shape).astype(np.float32) for shape in shapes), ids


def gradients(function, q, k, v, g):
    def total(q, k, v):
        out = function(q, k, v)
        return jnp.sum(out * g), out

    return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(q, k, v)


@functools.cache
def one_device(mask: str, kv_heads: int = KV_HEADS):
    *values, ids = arrays(kv_heads)
    options = dict(MASKS[mask])
    pair = (ids, ids) if options.pop("documents", False) else None
    call = functools.partial(dot_product_attention, segment_ids=pair, implementation="reference", **options)
    return gradients(call, *values)


def many_devices(kind: str, mask: str, *, kv_heads: int = KV_HEADS, dealt=(), put=lambda x: x):
    """The same by `attend` under a layout; `put` reorders positions."""
    sizes, compute, context = KINDS[kind]
    mesh = make_mesh(jax.devices()[: np.prod(list(sizes.values()))], **sizes)
    layout = Layout(mesh, {}, compute, context=context)
    options = dict(MASKS[mask])
    with layout.with_dealt(dealt):
        place = lambda x, names: jax.device_put(put(x), layout.sharding(names.split()))
        q, k, v, g, ids = arrays(kv_heads)
        rows = "batch pos kv_heads head_dim"
        values = place(q, QUERY), place(k, rows), place(v, rows), place(g, QUERY)
        documents = named(place(ids, "batch pos"), "batch pos") if options.pop("documents", False) else None

        def call(q, k, v):
            return attend(named(q, QUERY), named(k, KEY), named(v, KEY), segment_ids=documents, **options).array

        return gradients(call, *values)


def assert_near(seen, wanted, tolerance=1e-5, put=lambda x: x):
    for a, b in zip(jax.tree.leaves(seen), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(put(b)), atol=tolerance, rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("kind, mask", CASES)
def test_many_devices_equal_one(kind, mask):
    assert_near(many_devices(kind, mask), one_device(mask))


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["documents", "all"])
@pytest.mark.parametrize("kind", ["gather", "ring of 8", "ring, gather", "ring, gather of more", "ring, exchange"])
def test_a_loop_over_steps_is_what_they_are_one_by_one(kind, mask, monkeypatch):
    """More than eight steps are a loop: of a ring of more devices, or over the keys that more devices gathered."""
    monkeypatch.setattr(program, "_UNROLLED", 0)
    assert_near(many_devices(kind, mask), one_device(mask))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ring", "gather", "exchange, few key heads", "ring, more heads than key heads"])
def test_a_single_key_head(kind):
    assert_near(many_devices(kind, "causal", kv_heads=1), one_device("causal", kv_heads=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, slices, axes, mask",
    [
        ("ring", 4, "a", "documents"),
        ("gather", 4, "a", "window over pieces"),
        ("ring, gather", 8, "ab", "documents"),
        ("ring, gather", 8, "ab", "window over pieces"),
        ("ring, exchange", 4, "a", "window over pieces"),
    ],
)
def test_positions_that_are_dealt_out_stay_where_they_are(kind, slices, axes, mask):
    put = lambda x: deal(x, slices)
    assert_near(many_devices(kind, mask, dealt=tuple(axes), put=put), one_device(mask), put=put)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, mask",
    [
        ("ring", "window over pieces"),
        ("ring, gather", "documents"),
        ("gather", "window over pieces"),
        ("exchange", "documents"),
    ],
)
def test_in_bfloat16(kind, mask):
    """To the rounding of the operands: gradients reach about 4."""
    half = lambda x: jnp.asarray(x, jnp.bfloat16) if x.dtype == np.float32 else x
    found = many_devices(kind, mask, put=half)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}
    assert_near(jax.tree.map(lambda x: x.astype(jnp.float32), found), one_device(mask), tolerance=0.06)


def test_dealing_is_one_order():
    x = jnp.arange(48.0)[None]
    pieces = np.arange(48).reshape(8, 6)
    np.testing.assert_array_equal(deal(x, 4)[0], pieces[[0, 7, 1, 6, 2, 5, 3, 4]].ravel())
    np.testing.assert_array_equal(deal(x[:, :8], 4)[0], [0, 7, 1, 6, 2, 5, 3, 4])


def moved(kind: str, mask: str):
    """The ledger of values and gradients; without the sum that makes one number of the result."""
    sizes, compute, context = KINDS[kind]
    mesh = make_mesh(jax.devices()[: np.prod(list(sizes.values()))], **sizes)
    options = {k: v for k, v in MASKS[mask].items() if k != "documents"}
    layout = Layout(mesh, {}, compute, context=context)
    with layout.with_dealt(layout.assign(("pos",))[0]):
        q, k, v, g, _ = (jax.device_put(x, NamedSharding(mesh, P(None, layout.assign(("pos",))[0]))) for x in arrays())

        def call(q, k, v):
            return jnp.sum(attend(named(q, QUERY), named(k, KEY), named(v, KEY), **options).array * g)

        found = ledger(jax.value_and_grad(call, (0, 1, 2)), q, k, v)
    return dataclasses.replace(found, rows=tuple(row for row in found.rows if row.payload > 4))


ROW = 4 * BATCH * HEAD_DIM  # bytes of one head of one position
SLICE = POS // 4 * KV_HEADS * ROW


@pytest.mark.slow
def test_a_ring_moves_what_a_gather_moves():
    """Keys and values of n - 1 slices forward; backward the same again, and as much of their gradients."""
    ring, gather = moved("ring", "causal"), moved("gather", "causal")
    assert ring.per_kind() == {"permute": 2 * 3 * SLICE + 2 * 3 * SLICE + 2 * 3 * SLICE}
    assert ring.total(direction="forward") == 2 * 3 * SLICE
    assert ring.total(direction="backward") == 4 * 3 * SLICE
    assert gather.per_kind() == {"all-gather": 2 * 3 * SLICE, "reduce-scatter": 2 * 3 * SLICE}


@pytest.mark.slow
def test_an_exchange_moves_each_array_once_each_way():
    """Queries, keys, values and the result; each device keeps one half of its part."""
    found = moved("exchange", "causal")
    part = POS // 2 * ROW * (2 * HEADS + 2 * KV_HEADS) // 2
    assert found.per_kind() == {"all-to-all": 2 * part}


def test_a_window_sends_what_it_shows():
    """Of two pieces of 8 positions, 2 are seen by the next pieces under a window of 3."""
    found = moved("ring", "window in a piece")
    seen = 2 * 2 * KV_HEADS * ROW
    assert found.per_kind() == {"permute": 2 * seen + 2 * seen + 2 * seen}


@pytest.mark.parametrize("kind", ["ring", "gather", "ring, gather"])
def test_the_busiest_device_has_no_more_to_do_than_another(kind):
    """Scores that a device computes: the whole of the tiles that it visits, of which the program is the same on all."""
    sizes, compute, context = KINDS[kind]
    mesh = make_mesh(jax.devices()[: np.prod(list(sizes.values()))], **sizes)
    scores = []

    class Counting(SplashTiles):
        def forward(self, tile, q, k, v, ids):
            share = 0.5 if not tile.full else 1.0
            scores.append(share * q.shape[0] * tile.queries * tile.keys)
            return jnp.zeros_like(q), jnp.zeros(q.shape[:3])

    layout = Layout(mesh, {}, compute, context=context)
    with layout:
        axes = layout.assign(("pos",))[0]
        ring = tuple(a for a in axes if context.get(a) == "ring")
        q, k, v, *_ = (jax.device_put(x, NamedSharding(mesh, P(None, axes))) for x in arrays())
        k, v = (jax.device_put(x, NamedSharding(mesh, P(None, ring))) for x in (k, v))
        program = Sliced(
            Counting(scale=1.0), Pattern(), ring, axes[len(ring) :], True, "batch key_pos kv_heads head_dim"
        )
        jax.eval_shape(lambda q, k, v: tiled_attention(placement_of(q, k, v), program, q, k, v, None), q, k, v)
    mean = BATCH * (POS * POS / 2) / mesh.size
    assert sum(scores) == mean


# The kernels of accelerators.


class Unused:
    """Stands for kernels, of which any use is an error."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, ring, whole, options, documents, most_keys",
    [
        ({"a": 2, "b": 2}, ("a", "b"), (), {}, True, 256),
        ({"a": 2}, ("a",), (), {"window": 100}, False, None),
        ({"a": 2, "b": 2}, ("a",), ("b",), {}, True, 128),
        ({"a": 2, "b": 2}, ("a",), ("b",), {"window": 300}, True, None),
        ({"a": 2}, ("a",), (), {"causal": False, "logit_softcap": 2.0}, False, 128),
    ],
)
def test_splash_over_slices_computes_the_reference(monkeypatch, sizes, ring, whole, options, documents, most_keys):
    """And kernels of our own where keys go around a ring, in several blocks of scores each, and backward in one kernel
    or several for so many keys each. Under a window those are not used."""
    monkeypatch.setattr(further, "CAUSAL", 128)
    monkeypatch.setattr(further, "WHOLE", 256)
    devices, head_dim = int(np.prod(list(sizes.values()))), 128
    pos = 2 * 256 * devices  # pieces of 256
    mesh = make_mesh(jax.devices()[:devices], **sizes)
    random = np.random.default_rng(0)
    values = [random.normal(0, 0.5, (1, pos, heads, head_dim)).astype(np.float32) for heads in (2, 1, 1, 2)]
    ids = np.arange(pos, dtype=np.int32)[None] // 390
    pair = (ids, ids) if documents else None
    reference = functools.partial(dot_product_attention, segment_ids=pair, implementation="reference")
    wanted = gradients(functools.partial(reference, **options), *values)
    cap = options.get("logit_softcap")
    pattern = Pattern(causal=options.get("causal", True), window=options.get("window"))
    given = dict(scale=head_dim**-0.5, logit_softcap=cap, widest=(256, 256), interpret=True)
    kernels = [SplashTiles(**given, further=Unused() if most_keys is None else None)]
    if most_keys is not None:
        units = mosaic.Units(2 * most_keys * further.KEY_BYTES, 2 * most_keys)
        kernels.append(SplashTiles(**given, further=further.FurtherTiles(**given, units=units)))
    with jax.set_mesh(mesh):
        put = lambda x, axes: jax.device_put(x, NamedSharding(mesh, P(None, axes)))
        q, k, v, g = (put(x, axes) for x, axes in zip(values, ((*ring, *whole), ring, ring, (*ring, *whole))))
        placed = (put(ids, (*ring, *whole)), put(ids, ring)) if documents else None
        for each in kernels:
            program = Sliced(each, pattern, ring, whole, False, "batch kv_heads key_pos head_dim")
            call = lambda q, k, v, program=program: tiled_attention(placement_of(q, k, v), program, q, k, v, placed)
            assert_near(gradients(call, q, k, v, g), wanted, tolerance=1e-5)


def test_refusals():
    mesh = make_mesh(jax.devices()[:8], a=4, b=2)
    q, k, v, *_ = arrays()
    with Layout(mesh, {}, {"pos": ("a", "b")}, context={"a": "exchange", "b": "ring"}):
        with pytest.raises(NamesError) as error:
            attend(
                *(named(jax.device_put(x, NamedSharding(mesh, P())), n) for x, n in ((q, QUERY), (k, KEY), (v, KEY)))
            )
    assert "got 'pos/a/b' with a: exchange, b: ring, in attend: write them in this order" in str(error.value)
    with pytest.raises(
        MeshError, match="one of gather, ring, exchange, got context 'a: rings' where the mesh has a, b"
    ):
        Layout(mesh, {}, {"pos": "a"}, context={"a": "rings"})
    with jax.set_mesh(mesh):
        q, k, v = (jax.device_put(x[:, :36], NamedSharding(mesh, P(None, "a"))) for x in (q, k, v))
        with pytest.raises(AttentionError) as error:
            dot_product_attention(q, k, v)
    assert str(error.value) == (
        "positions in slices must divide into two pieces a device, the same for queries and keys, got pos=36 and "
        "key_pos=36 over a, 8 pieces, in attention: use a length that is divisible by 8"
    )
    q, k, v, *_ = arrays()
    with jax.set_mesh(mesh):
        put = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
        with pytest.raises(AttentionError) as error:
            dot_product_attention(put(q, None, "a"), put(k[:, :16]), put(v[:, :16]))
        assert str(error.value) == (
            f"sliced queries and keys must have the same number of positions, got pos={q.shape[1]} and key_pos=16 "
            "over a, in attention: exchange positions for heads (the layout's context, exchange), or leave pos whole"
        )
        with pytest.raises(
            PlacementError,
            match="sliced queries and keys must have the same number of positions, .*exchange positions for heads",
        ):
            dot_product_attention(put(q, None, "a"), put(k[:, :16], None, "a"), put(v[:, :16], None, "a"))
