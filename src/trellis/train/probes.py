"""Kernels of a step on one CPU device, timed by themselves to find the best way to cut them."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from trellis.named.backend import product
from trellis.named.tuned import Tuned, tuned_for
from trellis.nn.attention import dot_product_attention
from trellis.nn.loss import linear_cross_entropy
from trellis.run.config import Run

# The usual choice stays unless another is faster by this much: less is within the noise.
GAIN = 0.95
_ROUNDS = 7
# Rows are left out of a part that has more tokens, so that what is timed takes milliseconds.
_MOST_TOKENS = 4096

Value = TypeVar("Value")


def fastest(
    candidates: Mapping[Value, Callable[[], Any]], usual: Value, clock: Callable[[], float] = time.perf_counter
) -> Value:
    """The candidate whose call takes the shortest time, or the usual one if none is faster by 5 %.

    They are called in turn, and the fastest call of each counts: whatever else the machine does affects all alike.

    Args:
        candidates: what to call for each; the results are waited for.
        usual: one of them.
        clock: seconds.
    """
    for call in candidates.values():  # compiles
        jax.block_until_ready(call())
    best = dict.fromkeys(candidates, math.inf)
    for _ in range(_ROUNDS):
        for value, call in candidates.items():
            started = clock()
            jax.block_until_ready(call())
            best[value] = min(best[value], clock() - started)
    found = min(best, key=best.__getitem__)
    return found if best[found] < GAIN * best[usual] else usual


def probes(run: Run, rows: int) -> dict[str, dict[Any, Callable[[], Any]]]:
    """The choices for the kernels of a run, by field of `run.cpu`: what to call for each value, the usual one first.

    Args:
        run: the run.
        rows: sequences of a microbatch on a device.
    """
    rows = max(1, min(rows, _MOST_TOKENS // run.data.sequence_length))
    found = {
        "attention_chunk": {chunk: _attention(run, rows, chunk) for chunk in _chunks(128, run.data.sequence_length)},
        "loss_chunk": {chunk: _loss(run, rows, chunk) for chunk in _chunks(512, rows * run.data.sequence_length)},
        "turned": {turned: _products(run, rows, turned) for turned in ("narrower", "none")},
    }
    return {field: calls for field, calls in found.items() if len(calls) > 1}


def _chunks(usual: int, most: int) -> list[int]:
    return [usual, *(chunk for chunk in (usual // 2, usual * 2) if chunk <= most)]


def _attention(run: Run, rows: int, chunk: int) -> Callable[[], Any]:
    model, length = run.model, run.data.sequence_length
    q = _numbers(run, rows, length, model.heads, model.head_dim)
    kv = _numbers(run, rows, length, model.kv_heads, model.head_dim)
    ids = jnp.zeros((rows, length), jnp.int32) if run.data.mask_documents else None
    documents = None if ids is None else (ids, ids)
    attend = lambda q, k, v: dot_product_attention(q, k, v, segment_ids=documents).astype(jnp.float32).sum()
    return _backward(attend, Tuned(attention_chunk=chunk), q, kv, kv)


def _loss(run: Run, rows: int, chunk: int) -> Callable[[], Any]:
    x = _numbers(run, rows, run.data.sequence_length, run.model.embed)
    table = _numbers(run, run.model.vocab, run.model.embed)
    targets = jnp.zeros(x.shape[:2], jnp.int32)
    total = lambda x, table: linear_cross_entropy(x, table, targets, vocab_first=True).total
    return _backward(total, Tuned(loss_chunk=chunk), x, table)


def _products(run: Run, rows: int, turned) -> Callable[[], Any]:
    """A feed-forward block: in the first product the left operand is the narrower, in the second the gradient is."""
    x = _numbers(run, rows * run.data.sequence_length, run.model.embed)
    up, down = _numbers(run, run.model.embed, run.model.mlp), _numbers(run, run.model.mlp, run.model.embed)
    numbers = (((1,), (0,)), ((), ()))
    block = lambda x, up, down: jnp.tanh(product(jnp.tanh(product(x, up, numbers)), down, numbers))
    total = lambda *arrays: block(*arrays).astype(jnp.float32).sum()
    return _backward(total, Tuned(turned=turned), x, up, down)


def _numbers(run: Run, *shape: int) -> jax.Array:
    """Drawn on the host: XLA takes up to a second and a half to compile what draws an array of one shape."""
    drawn = np.random.default_rng(0).standard_normal(shape, np.float32)
    return jnp.asarray(drawn.astype(run.precision.compute))


def _backward(total: Callable, choice: Tuned, *arrays: jax.Array) -> Callable[[], Any]:
    """A function that computes the gradients of a total with respect to its arrays, under a choice."""

    def gradients(*arrays):
        with tuned_for(choice):
            return jax.grad(total, tuple(range(len(arrays))))(*arrays)

    jitted = jax.jit(gradients)
    return lambda: jitted(*arrays)
