"""What names cost: the time to trace a 32-layer scanned Llama written in named arrays, against plain JAX.

    python benchmarks/trace_overhead.py

Traces the gradient of the loss (`jax.jit(...).trace`), alternating between the two, and prints the ratio of medians of
the processor's time, and that of the Python functions called, which is a count and holds on any machine.
Both keep the same for the backward pass: the gate of the feed-forward block is one function on arrays.
At run time names cost nothing: `tests/equivalence/test_plain.py` holds the compiled programs against each other.
"""

import argparse
import cProfile
import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp

from trellis import nn
from trellis.data import Batch
from trellis.models import LlamaConfig
from trellis.train import StepOptions, batch_loss

CONFIG = LlamaConfig(
    vocab=512, embed=64, layers=32, heads=4, kv_heads=2, head_dim=16, mlp=128, rope_theta=1e4, tie_embeddings=True
)
BATCH, POS = 4, 128


def rms(x, scale):
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + CONFIG.norm_eps)
    return wide.astype(x.dtype) * scale


def rotate(x, cos, sin):
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


def plain_loss(params, batch):
    """The same arithmetic as `models/llama/llama.py`, in plain JAX, with the same attention and loss kernels."""
    x = params["embedding"][batch["tokens"]]
    rates = jnp.asarray(nn.frequencies(CONFIG.head_dim, CONFIG.rope_theta), jnp.float32)
    angles = jnp.arange(POS, dtype=jnp.float32)[:, None] * jnp.concatenate([rates, rates])
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]

    def block(x, p):
        h = rms(x, p["attention_norm"])
        q, k, v = (jnp.einsum("bpe,ehd->bphd", h, p[n]) for n in "qkv")
        out = nn.dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + jnp.einsum("bphd,hde->bpe", out, p["out"])
        h = rms(x, p["mlp_norm"])
        gate, up = (jnp.einsum("bpe,em->bpm", h, p[n]) for n in ("gate", "up"))
        return x + jnp.einsum("bpm,me->bpe", nn.swiglu(gate, up), p["down"]), None

    x, _ = jax.lax.scan(block, x, params["layers"])
    x = rms(x, params["norm"])
    sums = nn.linear_cross_entropy(x, params["embedding"], batch["targets"], batch["loss_mask"], vocab_first=True)
    return sums.total / sums.tokens


def named_loss(model, batch):
    sums, _ = batch_loss(model, Batch(**batch).named(), StepOptions())
    return sums.total / sums.tokens


def programs():
    """The two functions with their abstract arguments."""
    model = jax.eval_shape(lambda: CONFIG.init(key=jax.random.key(0)))
    block = model.layers.block
    attention, mlp = block.attention, block.mlp
    layers = {n: getattr(attention, n).array for n in ("q", "k", "v", "out")}
    layers |= {n: getattr(mlp, n).array for n in ("gate", "up", "down")}
    layers |= {n: getattr(block, n).scale.array for n in ("attention_norm", "mlp_norm")}
    params = {"embedding": model.embedding.array, "norm": model.norm.scale.array, "layers": layers}
    ids = jax.ShapeDtypeStruct((BATCH, POS), jnp.int32)
    mask = jax.ShapeDtypeStruct((BATCH, POS), jnp.float32)
    batch = {"tokens": ids, "targets": ids, "loss_mask": mask}
    return (plain_loss, params, batch), (named_loss, model, {**batch, "segment_ids": None, "positions": None})


def trace(fn, params, batch):
    jax.jit(jax.value_and_grad(lambda p, b: fn(p, b))).trace(params, batch)


def calls() -> float:
    """How many Python functions tracing the named program calls, relative to the plain one, when traced again."""
    counts = []
    for program in programs():
        trace(*program)
        profile = cProfile.Profile()
        profile.runcall(trace, *program)
        counts.append(sum(entry.callcount for entry in profile.getstats()))
    return counts[1] / counts[0]


def measure(rounds: int = 30) -> dict:
    """Medians in milliseconds of the processor's time, their ratio, and that of the functions called."""
    times = {"plain": [], "named": []}
    for _ in range(rounds + 2):
        for name, program in zip(times, programs(), strict=True):
            start = time.process_time()
            trace(*program)
            times[name].append((time.process_time() - start) * 1e3)
    medians = {name: statistics.median(t[2:]) for name, t in times.items()}
    return {
        **{f"{k}_ms": round(v, 1) for k, v in medians.items()},
        "ratio": round(medians["named"] / medians["plain"], 3),
        "calls": round(calls(), 3),
    }


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    jax.config.update("jax_platforms", "cpu")
    json.dump(measure(), sys.stdout, indent=2)
    print()
