"""The plain JAX step that Trellis is compared with: what a careful person writes by hand in an afternoon.

One device, no mesh, `jax.numpy` and Optax, layers as a Python loop, softmax attention over a causal mask, cross
entropy from the logits of the whole batch. Nothing here is slow on purpose and nothing is tuned.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True)
class Shape:
    """A model and its batch."""

    family: str
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    batch: int
    pos: int

    @property
    def tokens(self) -> int:
        return self.batch * self.pos


SHAPES = {
    "nano": Shape("gpt2", embed=256, layers=4, heads=4, kv_heads=4, mlp=1024, vocab=1024, batch=16, pos=256),
    "small-llama": Shape("llama", embed=512, layers=6, heads=8, kv_heads=4, mlp=1408, vocab=4096, batch=8, pos=512),
}
LEARNING_RATE, WEIGHT_DECAY, CLIP = 3e-4, 0.1, 1.0


def attention(q, k, v):
    """Causal softmax attention; `q` is `batch pos heads head_dim`, `k` and `v` have the same or fewer heads."""
    groups = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(mask, scores.astype(jnp.float32), -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(v.dtype), v)


def cross_entropy(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()


# GPT-2: learned positions, LayerNorm, biases, tanh-GELU, tied unembedding.


def layer_norm(x, p):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]


def linear(x, p):
    return x @ p["weight"] + p["bias"]


def gpt2_init(key, s: Shape):
    keys = iter(jax.random.split(key, 64))
    norm = lambda: {"scale": jnp.ones(s.embed), "bias": jnp.zeros(s.embed)}
    dense = lambda i, o: {"weight": 0.02 * jax.random.normal(next(keys), (i, o)), "bias": jnp.zeros(o)}
    block = lambda: {
        "norm1": norm(), "qkv": dense(s.embed, 3 * s.embed), "out": dense(s.embed, s.embed),
        "norm2": norm(), "up": dense(s.embed, s.mlp), "down": dense(s.mlp, s.embed),
    }  # fmt: skip
    return {
        "tokens": 0.02 * jax.random.normal(next(keys), (s.vocab, s.embed)),
        "positions": 0.02 * jax.random.normal(next(keys), (s.pos, s.embed)),
        "blocks": [block() for _ in range(s.layers)],
        "norm": norm(),
    }


def gpt2_loss(params, tokens, targets, s: Shape):
    batch, pos = tokens.shape
    x = params["tokens"][tokens] + params["positions"]
    for p in params["blocks"]:
        q, k, v = jnp.split(linear(layer_norm(x, p["norm1"]), p["qkv"]), 3, axis=-1)
        q, k, v = (a.reshape(batch, pos, s.heads, -1) for a in (q, k, v))
        x = x + linear(attention(q, k, v).reshape(batch, pos, s.embed), p["out"])
        x = x + linear(jax.nn.gelu(linear(layer_norm(x, p["norm2"]), p["up"])), p["down"])
    return cross_entropy(layer_norm(x, params["norm"]) @ params["tokens"].T, targets)


# Llama: rotary positions, RMSNorm, no biases, SwiGLU, grouped heads, separate unembedding.


def rms_norm(x, scale):
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale


def rotate(x):
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def llama_init(key, s: Shape):
    keys = iter(jax.random.split(key, 64))
    dense = lambda i, o: 0.02 * jax.random.normal(next(keys), (i, o))
    kv = s.kv_heads * s.embed // s.heads
    block = lambda: {
        "norm1": jnp.ones(s.embed), "q": dense(s.embed, s.embed), "k": dense(s.embed, kv), "v": dense(s.embed, kv),
        "out": dense(s.embed, s.embed), "norm2": jnp.ones(s.embed), "gate": dense(s.embed, s.mlp),
        "up": dense(s.embed, s.mlp), "down": dense(s.mlp, s.embed),
    }  # fmt: skip
    return {
        "tokens": dense(s.vocab, s.embed),
        "blocks": [block() for _ in range(s.layers)],
        "norm": jnp.ones(s.embed),
        "unembed": dense(s.embed, s.vocab),
    }


def llama_loss(params, tokens, targets, s: Shape):
    batch, pos = tokens.shape
    x = params["tokens"][tokens]
    for p in params["blocks"]:
        h = rms_norm(x, p["norm1"])
        q, k, v = (
            (h @ p[name]).reshape(batch, pos, n, -1)
            for name, n in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads))
        )
        x = x + attention(rotate(q), rotate(k), v).reshape(batch, pos, s.embed) @ p["out"]
        h = rms_norm(x, p["norm2"])
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    return cross_entropy(rms_norm(x, params["norm"]) @ params["unembed"], targets)


INIT = {"gpt2": gpt2_init, "llama": llama_init}
LOSS = {"gpt2": gpt2_loss, "llama": llama_loss}


def make_step(s: Shape, dtype=jnp.float32):
    """`(state, step)`: parameters and optimizer state in float32, products in `dtype`; `step` donates its state."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.adamw(
            LEARNING_RATE, b2=0.95, weight_decay=WEIGHT_DECAY, mask=lambda p: jax.tree.map(lambda a: a.ndim > 1, p)
        ),
    )
    params = INIT[s.family](jax.random.key(0), s)

    def loss_of(params, tokens, targets):
        return LOSS[s.family](jax.tree.map(lambda a: a.astype(dtype), params), tokens, targets, s)

    @partial(jax.jit, donate_argnums=0)
    def step(state, tokens, targets):
        params, opt_state = state
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens, targets)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return (params, optimizer.init(params)), step
