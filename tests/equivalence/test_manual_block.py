"""The same transformer block, written by hand for one device's slices: FSDP, tensor and sequence parallelism.

All communication is in the text, and so are the types. The names of mesh axes are the program's; on a mesh where one of
them has size 1 the same text moves less.
"""

import collections

import jax
import jax.numpy as jnp
import pytest

import trellis as tr
from trellis import Stack, f32
from trellis.nn.rope import rotary_tables
from trellis.notation import struct_specs

from .block import BATCH, CONFIG, POS, inputs, parameters
from .test_block import GRADIENT_BOUND, LOSS_BOUND, one_device, relative


@tr.struct
class Layer:
    attention_norm: f32["embed/data"]
    q: f32["embed/data heads/model head_dim"]
    k: f32["embed/data heads/model head_dim"]
    v: f32["embed/data heads/model head_dim"]
    out: f32["heads/model head_dim embed/data"]
    mlp_norm: f32["embed/data"]
    gate: f32["embed/data mlp/model"]
    up: f32["embed/data mlp/model"]
    down: f32["mlp/model embed/data"]


def normalize(x, scale):
    """`batch/data pos/model embed`, normalized and scaled; whole sequences come back, to be used in products."""
    # Each device has other positions, so the scale's gradient is summed over both axes.
    scale = tr.reshard("embed/data -> embed ~data ~model", scale)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + CONFIG.norm_eps)
    x = tr.einsum("batch/data pos/model embed, embed ~data ~model -> batch/data pos/model embed", x, scale)
    return tr.all_gather("batch/data pos/model embed -> batch/data pos embed ~model", x)


def rotate(x, cos, sin):
    first, second = jnp.split(x, 2, -1)
    turned = jnp.concatenate([-second, first], -1)
    return x * cos[None, :, None] + turned * sin[None, :, None]


def attention(x, layer: Layer, cos, sin):
    qkv = []
    for at_rest in (layer.q, layer.k, layer.v):
        w = tr.all_gather("embed/data heads/model head_dim -> embed heads/model head_dim ~data", at_rest)
        text = "batch/data pos embed ~model, embed heads/model head_dim ~data -> batch/data pos heads/model head_dim"
        qkv.append(tr.einsum(text, x, w))
    q, k, v = rotate(qkv[0], cos, sin), rotate(qkv[1], cos, sin), qkv[2]
    scores = tr.einsum(
        "batch/data pos heads/model head_dim, batch/data key_pos heads/model head_dim "
        "-> batch/data heads/model pos key_pos",
        q,
        k,
    )
    seen = jnp.tril(jnp.ones((POS, POS), bool))
    weights = jax.nn.softmax(jnp.where(seen[None, None], scores * CONFIG.head_dim**-0.5, -jnp.inf), -1)
    mixed = tr.einsum(
        "batch/data heads/model pos key_pos, batch/data key_pos heads/model head_dim "
        "-> batch/data pos heads/model head_dim",
        weights,
        v,
    )
    w = tr.all_gather("heads/model head_dim embed/data -> heads/model head_dim embed ~data", layer.out)
    y = tr.einsum(
        "batch/data pos heads/model head_dim, heads/model head_dim embed ~data -> batch/data pos embed +model", mixed, w
    )
    return tr.reduce_scatter("batch/data pos embed +model -> batch/data pos/model embed", y)


def feed_forward(x, layer: Layer):
    gate, up = (tr.all_gather("embed/data mlp/model -> embed mlp/model ~data", w) for w in (layer.gate, layer.up))
    down = tr.all_gather("mlp/model embed/data -> mlp/model embed ~data", layer.down)
    gate, up = (
        tr.einsum("batch/data pos embed ~model, embed mlp/model ~data -> batch/data pos mlp/model", x, w)
        for w in (gate, up)
    )
    y = tr.einsum(
        "batch/data pos mlp/model, mlp/model embed ~data -> batch/data pos embed +model", jax.nn.silu(gate) * up, down
    )
    return tr.reduce_scatter("batch/data pos embed +model -> batch/data pos/model embed", y)


@tr.shard_map
def block_loss(
    layers: Stack["layers", Layer],
    x: f32["batch/data pos/model embed"],
    weights: f32["batch/data pos/model embed"],
    rope: tuple[f32["pos head_dim"], f32["pos head_dim"]],
) -> f32[""]:
    @jax.checkpoint
    def step(x, layer):
        x = x + attention(normalize(x, layer.attention_norm), layer, *rope)
        return x + feed_forward(normalize(x, layer.mlp_norm), layer), None

    out, _ = jax.lax.scan(step, x, layers)
    total = tr.einsum(
        "batch/data pos/model embed, batch/data pos/model embed -> +data +model", out, weights + 0.1 * out
    )
    return tr.all_reduce("+data +model -> ", total) / (BATCH * POS)


def flat(layers) -> Layer:
    """The named parameters of the stack as plain arrays."""
    b = layers.block
    named = {
        "attention_norm": b.attention_norm.scale,
        "q": b.attention.q,
        "k": b.attention.k.rename(kv_heads="heads"),
        "v": b.attention.v.rename(kv_heads="heads"),
        "out": b.attention.out,
        "mlp_norm": b.mlp_norm.scale,
        "gate": b.mlp.gate,
        "up": b.mlp.up,
        "down": b.mlp.down,
    }
    return Layer(**{name: value.array for name, value in named.items()})


def arrays(mesh):
    """Layers, input, loss weights and rotary tables, each where its annotation says."""
    put = lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
    axis, whole = tr.Axis("head_dim", CONFIG.head_dim), jax.sharding.PartitionSpec()
    rope = tuple(put(t.array, whole) for t in rotary_tables(tr.arange(tr.Axis("pos", POS)), axis, CONFIG.rope_theta))
    place = struct_specs(f32["batch/data pos/model embed"], mesh)
    layers = jax.tree.map(put, flat(parameters()), struct_specs(Stack["layers", Layer], mesh))
    return layers, *(put(x.array, place) for x in inputs()), rope


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 4, "model": 2}, {"data": 8, "model": 1}, {"data": 1, "model": 8}], ids=str)
def test_manual_equals_one_device(sizes):
    mesh = tr.make_mesh(**sizes)
    given = arrays(mesh)
    with jax.set_mesh(mesh):
        value, (by_layers, by_x) = jax.jit(jax.value_and_grad(block_loss, argnums=(0, 1)))(*given)
    expected, gradients = one_device()
    assert abs(value - expected) <= LOSS_BOUND * abs(expected)
    assert jax.tree.map(tr.typeof, by_layers) == jax.tree.map(tr.typeof, given[0])
    wanted = (jax.device_get(flat(gradients[0])), gradients[1].array)
    assert relative((by_layers, by_x), wanted) <= GRADIENT_BOUND


@pytest.mark.slow
def test_what_the_text_says_is_what_moves():
    """Per layer: each weight is gathered forward and again for the backward pass, and its gradient scattered once;
    activations are gathered and scattered twice a pass (two half blocks), and gathered again by the recomputation."""
    mesh = tr.make_mesh(data=4, model=2)
    given = arrays(mesh)
    with jax.set_mesh(mesh):
        rows = tr.ledger(jax.value_and_grad(block_loss, argnums=(0, 1)), *given)
    counts = collections.Counter()
    for row in rows:
        counts[row.direction, row.kind, row.axes] += row.times
    # Nine weights a layer (two of them norms), two layers.
    per_layer = {
        ("forward", "all-gather", ("data",)): 9,
        ("forward", "all-gather", ("model",)): 2,
        ("forward", "reduce-scatter", ("model",)): 2,
        ("recomputed", "all-gather", ("data",)): 9,
        ("recomputed", "all-gather", ("model",)): 2,
        ("recomputed", "reduce-scatter", ("model",)): 1,  # the second half block's result is not needed again
        ("backward", "reduce-scatter", ("data",)): 9,
        ("backward", "all-gather", ("model",)): 2,
        ("backward", "reduce-scatter", ("model",)): 2,
        ("backward", "all-reduce", ("model",)): 2,  # the norms' scales, which every device uses on other positions
    }
    wanted = {key: CONFIG.layers * count for key, count in per_layer.items()}
    assert counts == wanted | {("forward", "all-reduce", ("data", "model")): 1}
    texts = {row.what for row in rows if row.axes == ("data",) and row.direction == "backward"}
    assert "embed heads/model head_dim +data -> embed/data heads/model head_dim" in texts
