"""Our own attention kernels for TPUs, which take the result or the gradients so far (`trellis.nn.attention.mosaic`).

Operands are the first block of queries and of keys, q in powers of two, k, v, the documents of queries and of keys;
then the result so far and the log of its sums, or the output's product with its gradient, the log of the sums, the
output's gradient and the gradients so far. The call's metadata says which positions the tile has.
"""

import math
import re
from collections.abc import Callable

import numpy as np

from trellis.inspect.hlo import Instruction
from trellis.program.said import mask_said
from trellis.proof.interpreter.kernels import attention
from trellis.proof.interpreter.values import NotInterpreted, each


def kernel(name: str, instruction: Instruction, machine) -> Callable:
    """Either kernel.

    Raises:
        NotInterpreted: the call does not say its tile, or scores have a soft cap.
    """
    said = dict(re.findall(r"\b(queries|keys|block_queries|block_keys|softcap)\W+(\d+|None)", instruction.attributes))
    if len(said) < 5 or said.pop("softcap") != "None":
        raise NotInterpreted(f"the kernel {name} with an unknown tile, or with a soft cap")
    sizes = {name: int(number) for name, number in said.items()}
    causal = mask_said(machine.program.scopes(instruction)) is not None
    run = _gradient if name.startswith("attention_gradient") else _forward

    def one(*values: np.ndarray) -> tuple[np.ndarray, ...]:
        (query, key), q, k, v, *rest = values
        rows = slice(query * sizes["block_queries"], query * sizes["block_queries"] + sizes["queries"])
        columns = slice(key * sizes["block_keys"], key * sizes["block_keys"] + sizes["keys"])
        seen = np.ones((1, 1, sizes["queries"], sizes["keys"]), bool)
        seen = np.tril(seen) if causal else seen
        if rest[0].dtype.kind == "i":
            query_ids, key_ids, *rest = rest
            seen = seen & (query_ids[:, :, rows, None] == key_ids[:, :, None, columns])
        q, k, v = q[:, :, rows] * q.dtype.type(math.log(2)), k[:, :, columns], v[:, :, columns]
        return run(q, k, v, attention.scores_of(q, k, seen), rows, columns, *rest)

    return lambda values, team: each(one, values, team)


def _forward(q, k, v, scores, rows, columns, out, log_sum) -> tuple[np.ndarray, ...]:
    found, more = attention.forward(scores, v)
    before = log_sum[:, :, 0, rows]
    total = np.logaddexp(before, more).astype(log_sum.dtype)
    shares = (np.exp(x - total)[..., None] for x in (before, more))
    both = sum(share * x for share, x in zip(shares, (out[:, :, rows], found), strict=True))
    return _with(out, both, rows), _with(log_sum.swapaxes(2, 3), total[..., None], rows).swapaxes(2, 3)


def _gradient(q, k, v, scores, rows, columns, known, log_sum, d_out, d_q, *d_keys) -> tuple[np.ndarray, ...]:
    known, log_sum = (x[:, :, 0, rows] for x in (known, log_sum))
    found = attention.backward(q, k, v, scores, log_sum, d_out[:, :, rows], known)
    parts = zip((d_q, *d_keys), found, (rows, columns, columns))  # the last is of scores
    return tuple(_with(x, x[:, :, where] + more, where) for x, more, where in parts)


def _with(x: np.ndarray, part: np.ndarray, where: slice) -> np.ndarray:
    x = x.copy()
    x[:, :, where] = part
    return x


KERNELS: dict[str, Callable] = {"attention_further": kernel, "attention_gradient_further": kernel}
