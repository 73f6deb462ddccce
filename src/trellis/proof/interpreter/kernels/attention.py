"""Softmax attention of one device in numpy, forward and backward: stands in for attention kernels."""

import numpy as np

# The score of a hidden key in attention kernels.
HIDDEN = -0.7 * float(np.finfo(np.float32).max)


def scores_of(q: np.ndarray, k: np.ndarray, seen: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """`batch heads pos key_pos`, -inf where a query does not see a key. Query head h reads key head h // groups.

    Args:
        q: `batch heads pos head_dim`, scaled already.
        k: `batch kv_heads key_pos head_dim`.
        seen: booleans that broadcast to the result.
        bias: added to the scores; broadcasts likewise.
    """
    scores = np.matmul(q, _repeated(k, q).swapaxes(2, 3))
    return np.where(seen, scores if bias is None else scores + bias, -np.inf)


def forward(scores: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The output, `batch heads pos head_dim`, and the log of the sums of exponentials, `batch heads pos`.

    For a query that sees no key, the output is zero and the log as small as kernels make it, no NaN and no infinity:
    when tiles are added up, such a query counts for nothing.
    """
    largest = scores.max(-1, keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0)
    weights = np.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    some = np.where(total, total, 1)
    out = np.matmul(weights / some, _repeated(v, scores))
    return out, np.where(total, largest + np.log(some), HIDDEN)[..., 0].astype(scores.dtype)


def backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scores: np.ndarray,
    log_sum: np.ndarray,
    d_out: np.ndarray,
    mean: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of the scaled queries, of keys, of values, and of the scores.

    Args:
        q, k, v: as in `scores_of`; v like k.
        scores: of them.
        log_sum: the log of the sums of exponentials, `batch heads pos`.
        d_out: the gradient of the output, `batch heads pos head_dim`.
        mean: the sum over `head_dim` of the output times its gradient, `batch heads pos`.
    """
    weights = np.exp(scores - log_sum[..., None])
    d_weights = np.matmul(d_out, _repeated(v, q).swapaxes(2, 3))
    d_scores = weights * (d_weights - mean[..., None])
    d_q = np.matmul(d_scores, _repeated(k, q))
    d_k = _folded(np.matmul(d_scores.swapaxes(2, 3), q), k)
    d_v = _folded(np.matmul(weights.swapaxes(2, 3), d_out), v)
    return d_q, d_k, d_v, d_scores


def _repeated(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Key heads, repeated as often as query heads read them."""
    return np.repeat(x, like.shape[1] // x.shape[1], axis=1)


def _folded(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Gradients of repeated heads, summed for each key head."""
    batch, heads, *rest = x.shape
    return x.reshape(batch, like.shape[1], heads // like.shape[1], *rest).sum(2)
