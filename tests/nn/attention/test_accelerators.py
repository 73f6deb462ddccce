"""The accelerators' kernels: splash interpreted on a CPU, and both compiled ahead of time for machines not here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trellis._compat import cudnn_assumed, sums_in_one_order
from trellis.hardware.chips import target
from trellis.hardware.described import described_devices
from trellis.mesh.meshes import make_mesh
from trellis.mesh.topology import slice_devices
from trellis.nn.attention import dot_product_attention as attention
from trellis.nn.attention import splash
from trellis.nn.attention.dispatch import AttentionError
from trellis.nn.attention.pattern import Pattern
from trellis.nn.attention.reference import reference_attention
from trellis.nn.attention.sharded import placement_of
from trellis.nn.attention.sliced.attention import tiled_attention
from trellis.nn.attention.sliced.tile import Tile
from trellis.nn.attention.sliced.whole import Whole
from trellis.nn.attention.splash import SplashTiles

POS, HEADS, KV_HEADS, HEAD_DIM = 256, 4, 2, 128


@pytest.mark.slow
@pytest.mark.parametrize(
    "window,documents,cap,block", [(None, False, None, 512), (70, True, 5.0, 512), (None, True, None, 128)]
)
def test_splash_computes_the_reference(monkeypatch, window, documents, cap, block):
    """A batch of one, whose heads go in two halves; in several blocks too, whose gradients of queries are added up."""
    monkeypatch.setattr(splash, "BLOCK", block)
    keys = jax.random.split(jax.random.key(0), 4)
    q, g = (0.5 * jax.random.normal(key, (1, POS, HEADS, HEAD_DIM)) for key in keys[:2])
    k, v = (0.5 * jax.random.normal(key, (1, POS, KV_HEADS, HEAD_DIM)) for key in keys[2:])
    ids = jnp.arange(POS)[None] // 90
    pair = (ids, ids) if documents else None
    pattern, scale = Pattern(window=window), HEAD_DIM**-0.5
    whole = Whole(SplashTiles(scale=scale, logit_softcap=cap, interpret=True), pattern)

    def total(function):
        def call(q, k, v):
            out = function(q, k, v)
            return jnp.sum(out * g), out

        return jax.jit(jax.grad(call, (0, 1, 2), has_aux=True))(q, k, v)

    with jax.numpy_dtype_promotion("standard"):
        seen = total(lambda q, k, v: tiled_attention(placement_of(q, k, v), whole, q, k, v, pair))
    wanted = total(
        lambda q, k, v: reference_attention(q, k, v, pair, pattern=pattern, scale=scale, logit_softcap=cap, upcast=True)
    )
    for a, b in zip(jax.tree.leaves(seen), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-4, rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("causal, ahead, documents", [(True, 0, True), (True, 128, False), (False, 0, True)])
def test_a_long_tiles_gradient_in_pieces_of_its_keys(monkeypatch, causal, ahead, documents):
    """Each piece by one kernel: of one block of keys here, and in what it is compared with of all of them.

    Where a tile is seen whole a block has twice as many keys, in two halves, and the tile is one piece.
    """
    tile = Tile(384, 384 + ahead if causal else 256, Pattern(causal=causal), ahead)
    random = np.random.default_rng(0)
    draw = lambda heads, size: random.normal(0, 0.5, (2, heads, size, HEAD_DIM)).astype(np.float32)
    q, d_out = draw(HEADS, tile.queries), draw(HEADS, tile.queries)
    k, v = draw(KV_HEADS, tile.keys), draw(KV_HEADS, tile.keys)
    ids = tuple(
        np.tile((np.arange(size, dtype=np.int32) + first) // 200, (2, 1))
        for size, first in ((384, ahead), (tile.keys, 0))
    )
    kernels = SplashTiles(scale=HEAD_DIM**-0.5, widest=(128, 128 if causal else 256), interpret=True)

    def gradients():
        splash._table.cache_clear()

        @jax.jit
        def run(q, k, v, d_out, pair):
            out, log_sum = kernels.forward(tile, q, k, v, pair)
            return kernels.backward(tile, q, k, v, pair, kernels.known(out, d_out), log_sum, d_out)

        return len(splash._pieces(tile, 512, kernels.widest)), run(q, k, v, d_out, ids if documents else None)

    whole, wanted = gradients()
    for name, value in (("BLOCK", 128), ("LARGE_BLOCK", 128), ("MANY", 1), ("WIDE_ROW", 512)):
        monkeypatch.setattr(splash, name, value)
    pieces, found = gradients()
    splash._table.cache_clear()
    assert (whole, pieces) == (1, tile.keys // kernels.widest[1])
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4)


def compiled(devices, sizes, q_axes, kv_axes, *, copied=(), **settings):
    """The text of attention's gradient, compiled for a mesh of the given devices."""
    mesh = make_mesh(devices, **sizes)

    def struct(heads, axes):
        return jax.ShapeDtypeStruct((8, 1024, heads, HEAD_DIM), jnp.bfloat16, sharding=NamedSharding(mesh, P(*axes)))

    def total(q, k, v):
        if copied:
            k, v = (jax.reshard(x, P(*kv_axes, None, reduced=set(copied))) for x in (k, v))
        return jnp.sum(attention(q, k, v, **settings).astype(jnp.float32) ** 2)

    arguments = struct(8, q_axes), struct(2, kv_axes), struct(2, kv_axes)
    with jax.set_mesh(mesh):
        return jax.jit(jax.grad(total, (0, 1, 2))).lower(*arguments).compile().as_text()


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 256])
def test_tpus_run_splash_on_each_device_and_move_nothing(window):
    axes = ("data", None, "model")
    text = compiled(slice_devices("v5e:2x2"), {"data": 2, "model": 2}, axes, axes, window=window)
    assert text.count("tpu_custom_call") >= (
        2 if window is None else 3
    )  # forward; backward, in two parts under a window
    assert not any(c in text for c in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


@pytest.mark.slow
@pytest.mark.parametrize("copied", [(), ("context",)])
def test_tpus_run_splash_under_context_parallelism(copied):
    q_axes, kv_axes = ("data", "context", None), ("data", None, None)
    sizes = {"data": 2, "context": 2}
    text = compiled(slice_devices("v5e:2x2"), sizes, q_axes, kv_axes, copied=copied)
    assert text.count("tpu_custom_call") >= 3
    assert "all-gather" not in text and "all-to-all" not in text


@pytest.mark.slow
def test_what_splash_saves_by_name_is_not_computed_again():
    mesh = make_mesh(slice_devices("v5e:2x2"), data=4)
    policy = jax.checkpoint_policies.save_only_these_names("attention")

    def calls(name):
        layer = jax.checkpoint(lambda q, k, v: attention(q, k, v, save_name=name), policy=policy)
        total = lambda q, k, v: jnp.sum(jnp.sin(layer(q, k, v).astype(jnp.float32)))
        sharding = NamedSharding(mesh, P("data"))
        arrays = [jax.ShapeDtypeStruct((4, 512, h, HEAD_DIM), jnp.bfloat16, sharding=sharding) for h in (4, 2, 2)]
        with jax.set_mesh(mesh):
            text = jax.jit(jax.grad(total, (0, 1, 2))).lower(*arrays).compile().as_text()
        return text.count('custom_call_target="tpu_custom_call"')

    assert calls(None) == calls("attention") + 1


def count(jaxpr, primitive: str) -> int:
    """How often a program runs a primitive."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            total += 1
            continue
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            total += count(inner, primitive) if hasattr(inner, "eqns") else 0
    return total


def test_gpus_run_cudnn_on_each_device():
    mesh = make_mesh(described_devices(target("4xH100")), data=2, model=2)

    def struct(heads):
        sharding = NamedSharding(mesh, P("data", None, "model"))
        return jax.ShapeDtypeStruct((8, 1024, heads, HEAD_DIM), jnp.bfloat16, sharding=sharding)

    total = lambda q, k, v: jnp.sum(attention(q, k, v, window=256).astype(jnp.float32) ** 2)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), cudnn_assumed():
        jaxpr = jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(struct(8), struct(2), struct(2)).jaxpr
    assert "bf16[4,1024,4,128]" in str(jaxpr)  # a device's part
    assert count(jaxpr, "dot_product_attention_fwd_wrapper") == 1
    assert count(jaxpr, "dot_product_attention_bwd_wrapper") == 1


@pytest.mark.parametrize("asked", [False, True])
def test_every_call_of_cudnn_says_that_sums_are_to_be_in_one_order(asked):
    """If one did not, XLA would take it for another one that does, and not find it."""
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    layer = lambda x: attention(x, x, x, implementation="cudnn")
    pull = jax.jit(jax.grad(lambda x: jnp.sum(layer(layer(x)).astype(jnp.float32))))
    with cudnn_assumed(), sums_in_one_order(asked):
        text = pull.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "__cudnn$fmha" in line and "custom_call" in line]
    assert len(calls) >= 2
    assert [("force_deterministic" in line) for line in calls] == [asked] * len(calls)


def test_splash_refuses_parts_that_are_not_whole_lanes():
    mesh = make_mesh(context=4, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        q = jax.device_put(jnp.ones((1, 256, 2, 8)), NamedSharding(mesh, P(None, "context")))
        k = jax.device_put(jnp.ones((1, 256, 2, 8)), NamedSharding(mesh, P()))
        with pytest.raises(AttentionError) as caught:
            attention(q, k, k, implementation="splash")
    assert str(caught.value) == (
        "an implementation must support the attention it is asked for, got 'splash': it takes lengths that are "
        "multiples of 128, not pos=256 in 8 pieces and key_pos=256, in attention(implementation='splash'): use "
        "implementation='auto'"
    )
