"""JAX's splash attention kernels for TPUs (`jax.experimental.pallas.ops.tpu.splash_attention`).

Operands are, in this order, tables of blocks (which block of keys is next, and whether it is hidden, seen or both),
q, k, v, the documents of queries and of keys, in the backward kernels the log of the sums of exponentials, the output's
gradient and its product with the output, and the queries' positions. The mask is a function inside the kernel. Its
author says it in a scope (`trellis.program.said.kernel_mask`); if nobody does, queries' positions stand for a causal
one. The tables have to agree with it.
"""

import re
from collections.abc import Callable

import numpy as np

from trellis.inspect.hlo import Instruction
from trellis.program.said import mask_said
from trellis.proof.interpreter.kernels import attention
from trellis.proof.interpreter.values import NotInterpreted, each

_NAME = re.compile(r"splash_mha_(fwd|dq|dkv)(_segmented)?_(no_)?residuals")
_TAIL = {"fwd": (), "dq": ("log_sum", "d_out", "mean"), "dkv": ("log_sum", "d_out", "mean")}


def kernel(name: str, instruction: Instruction, machine) -> Callable:
    """One of the three kernels, by its name.

    Raises:
        NotInterpreted: a kernel of another name, or one with a mask or sinks as operands.
    """
    found = _NAME.match(name)
    if found is None:
        raise NotInterpreted(f"the kernel {name}")
    phase, made = found[1], machine.type(instruction)
    kind, residuals = made if isinstance(made, tuple) else (made,), not found[3]
    names = ("q", "k", "v", *(("query_ids", "key_ids") if found[2] else ()), *_TAIL[phase])
    said = mask_said(machine.program.scopes(instruction))
    block = re.search(r"block_kv\W+(\d+)", instruction.attributes)

    def one(*values: np.ndarray) -> np.ndarray | tuple[np.ndarray, ...]:
        first = next(i for i, v in enumerate(values) if v.dtype.kind == "f")
        own = dict(zip(names, values[first:]))
        if own["q"].ndim == 3:  # of one sequence: the compiler has dropped the batch
            own = {name: x[None] for name, x in own.items()}
        rest = values[first + len(names) :]
        if len(rest) > 1 or any(v.dtype != np.int32 or v.ndim != 2 for v in rest):
            raise NotInterpreted(f"the kernel {name} with a mask or sinks as operands")
        seen = _seen(own, rest, phase, said)
        if first and phase == "fwd" and block:
            _check(values[0], values[1], seen[0, 0], int(block[1]))
        results = _results(kind, phase, own, seen & _together(own, phase), residuals)
        return results if isinstance(made, tuple) else results[0]

    return lambda values, team: each(one, values, team)


def _seen(own: dict[str, np.ndarray], rest, phase: str, said: tuple[int, int, int] | None) -> np.ndarray:
    """Which keys each query sees by its position: `1 1 pos key_pos`."""
    length, key_length = own["q"].shape[2], own["k"].shape[2]
    if not rest:
        return np.ones((1, 1, length, key_length), bool)
    positions = rest[0][0] if phase == "dkv" else rest[0][:, 0]
    before, after, ahead = said or (key_length, 0, 0)
    distance = positions[:, None] + ahead - np.arange(key_length)
    return ((distance <= before) & (distance >= -after))[None, None]


def _together(own: dict[str, np.ndarray], phase: str) -> np.ndarray:
    """Which keys are in each query's document: `batch 1 pos key_pos`."""
    if "query_ids" not in own:
        return np.ones((1, 1, 1, 1), bool)
    along_lanes = (own["query_ids"][:, :, 0], own["key_ids"][:, 0])
    queries, keys = (own["query_ids"][:, 0], own["key_ids"][:, :, 0]) if phase == "dkv" else along_lanes
    return queries[:, None, :, None] == keys[:, None, None, :]


def _check(following: np.ndarray, blocks: np.ndarray, seen: np.ndarray, width: int) -> None:
    """Checks a mask against the forward kernel's tables: 0 for blocks that are hidden, 2 for those that are seen."""
    height = len(seen) // blocks.shape[1]
    for (head, row, column), kind in np.ndenumerate(blocks):
        at = int(following[head, row, column]) * width
        part = seen[row * height : (row + 1) * height, at : at + width]
        if kind and (part.all() != (kind == 2) or not part.any()):
            raise NotInterpreted("a splash mask that is neither the declared one nor a causal one")


def _results(kind: tuple, phase: str, own: dict[str, np.ndarray], seen: np.ndarray, residuals: bool) -> tuple:
    """The kernel's results, the last of `kind`; those before them, until JAX 0.11, are its working memory: NaN."""
    q, k, v = own["q"], own["k"], own["v"]
    scores = attention.scores_of(q, k, seen)
    last = len(kind) - 1
    if phase == "fwd":
        out, log_sum = attention.forward(scores, v)
        found = {last - 1: out, last: log_sum[..., None]} if residuals else {last: out}
    else:
        log_sum, mean = own["log_sum"][:, :, 0], own["mean"][:, :, 0]
        d_q, d_k, d_v, _ = attention.backward(q, k, v, scores, log_sum, own["d_out"], mean)
        found = {last: d_q} if phase == "dq" else {last - 1: d_k, last: d_v}
        whole = last > 1 and len(kind[last - 2].shape) > len(kind[last].shape)
        if phase == "dkv" and whole:  # with the gradient of queries, for each block of keys by itself
            blocks = np.split(np.arange(k.shape[2]), kind[last - 2].shape[-4])
            parts = ((k[:, :, b], v[:, :, b], scores[..., b], log_sum, own["d_out"], mean) for b in blocks)
            found[last - 2] = np.stack([attention.backward(q, *part)[0] for part in parts], axis=1)
    made = (found.get(i, np.array(np.nan, q.dtype)) for i in range(len(kind)))
    return tuple(
        np.broadcast_to(x[0] if x.ndim > len(t.shape) else x, t.shape) for x, t in zip(made, kind, strict=True)
    )


KERNELS: dict[str, Callable] = {"splash_": kernel}
