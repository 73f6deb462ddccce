"""cuDNN's fused attention, as XLA calls it: `__cudnn$fmha[ScaleBias]Softmax[Backward]`."""

import json
import re
from collections.abc import Callable

import numpy as np

from trellis.inspect.hlo import Instruction
from trellis.proof.interpreter.kernels import attention
from trellis.proof.interpreter.values import NotInterpreted, each


def kernel(target: str, instruction: Instruction, machine) -> Callable:
    """The forward or the backward kernel, by the custom call's target.

    Queries, keys, values and the output's gradient are `batch pos heads head_dim`; results are `batch heads pos
    head_dim`, the log of the sums of exponentials `batch heads pos`, and working memory.

    Raises:
        NotInterpreted: with dropout, padding, rows of several sequences, or a mask of another kind.
    """
    kind = machine.type(instruction)
    settings = _settings(instruction)
    if int(settings.get("max_seg_per_batch", 1)) > 1 or settings.get("is_paged_attention"):
        raise NotInterpreted(f"{target} with several sequences in a row, or with pages")
    if settings["dropout_rate"] or settings["mask_type"] not in ("NO_MASK", "CAUSAL") or "Dropout" in target:
        raise NotInterpreted(f"{target} with {settings['mask_type']} and dropout {settings['dropout_rate']}")
    scale, window, biased = settings["fmha_scale"], int(settings["sliding_window_length"]), "Bias" in target
    causal = settings["mask_type"] == "CAUSAL" or window > 0

    def scored(q: np.ndarray, k: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        queries, keys = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])[None]
        seen = np.ones((q.shape[2], k.shape[2]), bool)
        if causal:
            seen &= queries >= keys
        if window:
            seen &= queries - keys < window
        return attention.scores_of(q * scale, k, seen, bias)

    def forward(*values: np.ndarray) -> tuple[np.ndarray, ...]:
        q, k, v = (x.swapaxes(1, 2) for x in values[:3])
        out, log_sum = attention.forward(scored(q, k, values[3] if biased else None), v)
        return _padded(kind, (out, log_sum)[: len(kind) - 1], q.dtype)  # without a backward pass the output alone

    def backward(*values: np.ndarray) -> tuple[np.ndarray, ...]:
        q, k, v = (x.swapaxes(1, 2) for x in values[:3])
        log_sum, d_out, out = values[3], values[4].swapaxes(1, 2), values[-1].swapaxes(1, 2)
        bias = values[5] if biased else None
        scores = scored(q, k, bias)
        found = attention.backward(q * scale, k, v, scores, log_sum, d_out, (out * d_out).sum(-1))
        d_q, d_k, d_v, d_scores = found
        if bias is None or len(kind) < 5:  # the bias has a gradient only if one is asked for
            return _padded(kind, (d_q * scale, d_k, d_v), q.dtype)
        over = tuple(i for i, (n, m) in enumerate(zip(bias.shape, d_scores.shape)) if n != m)
        return _padded(kind, (d_q * scale, d_k, d_v, d_scores.sum(over, keepdims=True)), q.dtype)

    return lambda values, team: each(backward if "Backward" in target else forward, values, team)


def _settings(instruction: Instruction) -> dict:
    """What the call says about the attention that it wants."""
    found = re.search(r"backend_config=(\{.*\})", instruction.attributes)
    return json.loads(found[1])["cudnn_fmha_backend_config"] if found else {}


def _padded(kind: tuple, found: tuple[np.ndarray, ...], dtype: np.dtype) -> tuple[np.ndarray, ...]:
    """Results in the program's types; what is only working memory is empty."""
    blank = (np.zeros(t.shape, dtype) for t in kind[len(found) :])
    return *(x.astype(dtype).reshape(t.shape) for x, t in zip(found, kind)), *blank


KERNELS: dict[str, Callable] = {"__cudnn$fmha": kernel}
