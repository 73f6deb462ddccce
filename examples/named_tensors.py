"""Named tensors, from sums to a data-, FSDP- and tensor-parallel step, with the collectives that each causes.

    python examples/named_tensors.py

The path of the first source document, the introduction to Levanter and Haliax, on eight CPU devices.
"""

import equinox as eqx
import jax
import jax.numpy as jnp

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import trellis as tr  # noqa: E402
from trellis.inspect import show  # noqa: E402

BATCH, POS, EMBED, HEADS, HEAD_DIM, MLP, LAYERS = 16, 8, 32, 4, 8, 64, 2


def names_instead_of_positions() -> None:
    """Operations go by name and broadcast by name."""
    x = tr.random.normal(jax.random.key(0), {"batch": 8, "height": 16, "width": 16})
    print("x                       ", tr.typeof(x))
    print("x.sum('height')         ", tr.typeof(x.sum("height")))
    print("x.sum(height and width) ", tr.typeof(x.sum(("height", "width"))))
    print("x / x.sum('height')     ", tr.typeof(x / x.sum("height")))
    print("vmap over batch         ", tr.typeof(tr.vmap(lambda image: image.sum("height"), "batch")(x)))


class Attention(eqx.Module):
    """Multi-head attention with one fused projection, written for one device."""

    qkv: tr.NamedArray
    out: tr.NamedArray

    @staticmethod
    def init(key) -> "Attention":
        keys = jax.random.split(key)
        inner = {"heads": HEADS, "head_dim": HEAD_DIM}
        return Attention(
            tr.random.normal(keys[0], {"embed": EMBED, "qkv": 3, **inner}, at="params") * EMBED**-0.5,
            tr.random.normal(keys[1], {**inner, "embed": EMBED}, at="params") * EMBED**-0.5,
        )

    def __call__(self, x: tr.NamedArray) -> tr.NamedArray:
        q, k, v = tr.einsum("... embed, embed qkv heads head_dim -> ... qkv heads head_dim", x, self.qkv).unbind("qkv")
        k, v = k.rename(pos="key_pos"), v.rename(pos="key_pos")
        scores = tr.dot(q * HEAD_DIM**-0.5, k, over="head_dim")
        causal = tr.outer(tr.greater_equal, tr.arange(q.axis("pos")), tr.arange(k.axis("key_pos")))
        weights = tr.softmax(tr.where(causal, scores, -1e9), "key_pos")
        return tr.einsum(
            "... heads head_dim, heads head_dim embed -> ... embed", tr.dot(weights, v, over="key_pos"), self.out
        )


class Mlp(eqx.Module):
    """Two products and a GELU."""

    up: tr.NamedArray
    down: tr.NamedArray

    @staticmethod
    def init(key) -> "Mlp":
        keys = jax.random.split(key)
        return Mlp(
            tr.random.normal(keys[0], {"embed": EMBED, "mlp": MLP}, at="params") * EMBED**-0.5,
            tr.random.normal(keys[1], {"mlp": MLP, "embed": EMBED}, at="params") * MLP**-0.5,
        )

    def __call__(self, x: tr.NamedArray) -> tr.NamedArray:
        return tr.dot(tr.gelu(tr.dot(x, self.up, over="embed")), self.down, over="mlp")


class Block(eqx.Module):
    """Attention and feed-forward, each added to the stream."""

    attention: Attention
    mlp: Mlp

    @staticmethod
    def init(key) -> "Block":
        keys = jax.random.split(key)
        return Block(Attention.init(keys[0]), Mlp.init(keys[1]))

    def __call__(self, x: tr.NamedArray) -> tr.NamedArray:
        x = x + self.attention(normalized(x))
        return x + self.mlp(normalized(x))


def normalized(x: tr.NamedArray) -> tr.NamedArray:
    """Zero mean and unit variance along `embed`."""
    x = x - x.mean("embed")
    return x * tr.rsqrt((x * x).mean("embed") + 1e-5)


def model(key) -> tr.Stacked:
    """Blocks stacked under `layers`: every parameter gets that name in front, and one block is compiled."""
    return tr.Stacked.init(Block.init, tr.Axis("layers", LAYERS), key=key)


def loss(layers: tr.Stacked, x: tr.NamedArray) -> jax.Array:
    """Mean square of what comes out; each layer keeps only what comes in for its backward pass."""
    out = layers.fold(x, policy=tr.Keep())
    return (out * out).mean().array


LAYOUTS = {
    "data parallel": ({"data": 8}, {}, {"batch": "data"}),
    "FSDP": ({"data": 8}, {"embed": "data"}, {"batch": "data"}),
    "FSDP and tensor parallel": (
        {"data": 4, "model": 2},
        {"embed": "data", "mlp": "model", "heads": "model"},
        {"batch": "data", "mlp": "model", "heads": "model"},
    ),
    "the same, sequence parallel": (
        {"data": 4, "model": 2},
        {"embed": "data", "mlp": "model", "heads": "model"},
        {"batch": "data", "mlp": "model", "heads": "model", "pos": "model"},
    ),
}


def one_step_everywhere() -> dict[str, float]:
    """The same model text under every layout: the same loss, other collectives."""
    x = tr.random.normal(jax.random.key(1), {"batch": BATCH, "pos": POS, "embed": EMBED})
    losses = {"one device": float(jax.jit(loss)(jax.jit(model)(jax.random.key(0)), x))}
    for name, (sizes, params, compute) in LAYOUTS.items():
        with tr.Layout(tr.make_mesh(**sizes), params=params, compute=compute) as layout:
            layers, batch = tr.named_jit(model)(jax.random.key(0)), tr.shard(x, "compute")
            value, _ = tr.named_jit(jax.value_and_grad(loss))(layers, batch)
            losses[name] = float(value)
            print(f"\n{name}: the feed-forward weight rests as {tr.typeof(layers.block.mlp.up)}")
            print(show(layout).text())
            print(tr.ledger(jax.value_and_grad(loss), layers, batch))
    return losses


def random_numbers_by_name() -> bool:
    """The same numbers on every mesh, each made where it stays."""
    draw = lambda: tr.random.normal(jax.random.key(2), {"embed": 4096, "mlp": 64})
    alone = jax.jit(draw)().array
    with tr.Layout(tr.make_mesh(data=8), compute={"embed": "data"}):
        spread = tr.named_jit(draw)()
    print("\n4096 x 64 normal numbers, one device and", tr.typeof(spread), end=": ")
    same = bool(jnp.array_equal(alone, jax.device_get(spread.array)))
    print("the same" if same else "different")
    return same


def main() -> dict[str, float]:
    names_instead_of_positions()
    losses = one_step_everywhere()
    print("\n" + "\n".join(f"{value:.7f}  {name}" for name, value in losses.items()))
    assert random_numbers_by_name()
    assert max(losses.values()) - min(losses.values()) < 1e-5
    return losses


if __name__ == "__main__":
    main()
