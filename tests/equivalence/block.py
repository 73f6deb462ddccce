"""The transformer block that every layout and mode is held against, and the layouts."""

import jax

import trellis as tr
from trellis.models.llama import Block, LlamaConfig
from trellis.named import Keep
from trellis.nn.rope import rotary_tables
from trellis.run.layouts import LayoutChoice, MeshSizes, make_layout

CONFIG = LlamaConfig(
    vocab=64, embed=32, layers=2, heads=8, kv_heads=8, head_dim=4, mlp=64, rope_theta=1e4, tie_embeddings=True
)
BATCH, POS = 16, 16

# Sizes of mesh axes, and the preset. Together: data parallel, FSDP, tensor, both, sequence, context, hybrid.
LAYOUTS = {
    "single": ({"data": 1}, "single"),
    "data 8": ({"data": 8}, "data"),
    "fsdp 8": ({"data": 8}, "fsdp"),
    "tensor 8": ({"data": 1, "model": 8}, "tensor"),
    "fsdp 4 x tensor 2": ({"data": 4, "model": 2}, "fsdp_tensor"),
    "fsdp 4 x tensor 2, sequence": ({"data": 4, "model": 2}, "fsdp_tensor_sequence"),
    "fsdp 4 x context 2": ({"data": 4, "context": 2}, "context"),
    "replica 2 x fsdp 2 x tensor 2": ({"replica": 2, "data": 2, "model": 2}, "hybrid"),
}


def layout_of(name: str, mode: str = "explicit") -> tr.Layout:
    """One of `LAYOUTS` on as many devices as it takes."""
    sizes, preset = LAYOUTS[name]
    count = 1
    for size in sizes.values():
        count *= size
    return make_layout(MeshSizes(**sizes), LayoutChoice(preset=preset, mode=mode), jax.devices()[:count])


def parameters() -> tr.Stacked:
    """Two blocks."""
    make = lambda key: Block.init(CONFIG, key=key)
    return tr.Stacked.init(make, tr.Axis("layers", CONFIG.layers), key=jax.random.key(0))


def inputs() -> tuple[tr.NamedArray, tr.NamedArray]:
    """`f32["batch pos embed"]`, and weights of the loss of the same type."""
    axes = {"batch": BATCH, "pos": POS, "embed": CONFIG.embed}
    keys = jax.random.split(jax.random.key(1))
    return tr.random.normal(keys[0], axes), tr.random.normal(keys[1], axes)


def loss(layers: tr.Stacked, x: tr.NamedArray, weights: tr.NamedArray, policy: Keep | None = None) -> jax.Array:
    """The weighted sum of what the blocks make of `x`, and a little of its square."""
    rope = rotary_tables(tr.arange(x.axis("pos")), tr.Axis("head_dim", CONFIG.head_dim), CONFIG.rope_theta)
    out = layers.fold(x, rope, None, policy=policy)
    return (out * (weights + 0.1 * out)).sum().array / (BATCH * POS)
