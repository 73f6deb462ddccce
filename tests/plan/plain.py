"""A small Llama-like train step in plain explicit-mode JAX: what the planner is tested on, apart from Trellis's models.

`embed` of every weight is sharded over the FSDP axes, heads and mlp over `model`; weights are gathered in bfloat16 at
use, layers are scanned and checkpointed, the optimizer is AdamW.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from trellis.program import Program, trace


@dataclasses.dataclass(frozen=True)
class Config:
    embed: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    mlp: int = 128
    vocab: int = 256
    seq: int = 32
    batch: int = 16  # sequences, over all devices
    policy: str = "full"  # what the checkpoint of a layer keeps: "full" (nothing) or "dots"


def abstract_mesh(platform: str = "cpu", **sizes: int) -> AbstractMesh:
    """A mesh of devices that are not here."""
    device = AbstractDevice(platform, None, platform)
    explicit = (AxisType.Explicit,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=explicit, abstract_device=device)


def specs(config: Config, fsdp, model):
    c, groups = config, config.heads // config.kv_heads
    return {
        "table": ((c.vocab, c.embed), P(None, fsdp)),
        "unembed": ((c.embed, c.vocab), P(fsdp, model)),
        "scale": ((c.layers, 2, c.embed), P()),
        "q": ((c.layers, c.embed, c.kv_heads, groups, c.head_dim), P(None, fsdp, model)),
        "k": ((c.layers, c.embed, c.kv_heads, c.head_dim), P(None, fsdp, model)),
        "v": ((c.layers, c.embed, c.kv_heads, c.head_dim), P(None, fsdp, model)),
        "o": ((c.layers, c.kv_heads, groups, c.head_dim, c.embed), P(None, model, None, None, fsdp)),
        "gate": ((c.layers, c.embed, c.mlp), P(None, fsdp, model)),
        "up": ((c.layers, c.embed, c.mlp), P(None, fsdp, model)),
        "down": ((c.layers, c.mlp, c.embed), P(None, model, fsdp)),
    }


def build(config: Config, mesh, fsdp=("data",), model=None):
    """The step, its abstract state `{"params", "mu", "nu", "count"}` and its abstract batch."""
    c = config
    fsdp = tuple(axis for axis in fsdp if mesh.shape.get(axis, 1) > 1) or None
    names = set(fsdp or ())
    fsdp = fsdp[0] if fsdp and len(fsdp) == 1 else fsdp
    model = model if model and mesh.shape.get(model, 1) > 1 else None
    shapes = specs(c, fsdp, model)

    def gathered(weight, spec):
        inside = tuple(None if entry == fsdp else entry for entry in spec)
        return reshard(weight.astype(jnp.bfloat16), P(*inside, reduced=names))

    def norm(x, scale):
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
        return (wide * scale.reshape(1, 1, -1)).astype(x.dtype)

    def once(x):  # one cast before several products, so that their gradients are summed once
        return reshard(x, P(fsdp, None, None, reduced={model})) if model else x

    def layer(x, weights):
        w = {name: gathered(weights[name], shapes[name][1][1:]) for name in weights if name != "scale"}
        n = once(norm(x, weights["scale"][0]))
        q = jnp.einsum("bse,ekgd->bkgsd", n, w["q"])
        k = jnp.einsum("bse,ekd->bksd", n, w["k"])
        v = jnp.einsum("bse,ekd->bksd", n, w["v"])
        scores = jnp.einsum("bkgsd,bktd->bkgst", q, k).astype(jnp.float32) * c.head_dim**-0.5
        causal = jnp.tril(jnp.ones((c.seq, c.seq), bool)).reshape(1, 1, 1, c.seq, c.seq)
        weights_ = jax.nn.softmax(jnp.where(causal, scores, -1e9), -1).astype(jnp.bfloat16)
        out = jnp.einsum("bkgst,bktd->bkgsd", weights_, v)
        x = x + jnp.einsum("bkgsd,kgde->bse", out, w["o"], out_sharding=P(fsdp, None, None))
        n = once(norm(x, weights["scale"][1]))
        h = jax.nn.silu(jnp.einsum("bse,ef->bsf", n, w["gate"])) * jnp.einsum("bse,ef->bsf", n, w["up"])
        return x + jnp.einsum("bsf,fe->bse", h, w["down"], out_sharding=P(fsdp, None, None))

    policies = jax.checkpoint_policies
    policy = {"full": policies.nothing_saveable, "dots": policies.dots_with_no_batch_dims_saveable}[c.policy]
    block = jax.checkpoint(layer, policy=policy)

    def loss_of(params, tokens):
        table = gathered(params["table"], shapes["table"][1])
        x = table.at[tokens].get(out_sharding=P(fsdp, None, None))
        layers = {name: params[name] for name in shapes if name not in ("table", "unembed")}
        x, _ = jax.lax.scan(lambda x, weights: (block(x, weights), None), x, layers)
        unembed = gathered(params["unembed"], shapes["unembed"][1])
        logits = jnp.einsum("bse,ev->bsv", once(x), unembed).astype(jnp.float32)
        words = jax.lax.broadcasted_iota(jnp.int32, (1, 1, c.vocab), 2, out_sharding=P(None, None, model))
        hot = words == tokens[..., None]
        target = jnp.sum(jnp.where(hot, logits, 0.0), -1)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - target)

    def step(state, tokens):
        loss, grads = jax.value_and_grad(loss_of)(state["params"], tokens)
        count = state["count"] + 1
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
        nu = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, state["nu"], grads)
        params = jax.tree.map(lambda p, m, v: p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), state["params"], mu, nu)
        return {"params": params, "mu": mu, "nu": nu, "count": count}, loss

    def abstract(shape, spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    weights = {name: abstract(shape, spec) for name, (shape, spec) in shapes.items()}
    state = {"params": weights, "mu": weights, "nu": weights, "count": abstract((), P(), jnp.int32)}
    return step, state, abstract((c.batch, c.seq), P(fsdp), jnp.int32)


def num_parameters(config: Config) -> int:
    return sum(math.prod(shape) for shape, _ in specs(config, None, None).values())


def traced(config: Config, mesh, **placing) -> Program:
    """The program of a small step."""
    step, state, batch = build(config, mesh, **placing)
    return trace(jax.jit(step, donate_argnums=0), state, batch)
