"""What a token costs: the FLOPs that utilisation (MFU) is counted with."""

import json
import math
import os
import platform
from collections.abc import Sequence
from typing import Any

import jax

from trellis.checkpoint.manifest import write_json
from trellis.hardware.peak import matmul_peak
from trellis.named import is_named
from trellis.train.compilation import cache_folder


def matmul_parameters(model: Any) -> int:
    """Parameters that multiply activations, of a model or its abstract tree.

    Of experts those count that a token meets. A table of vocabulary or positions is looked up, and does not count, but
    the unembedding does, without its padding rows; vectors (norms, biases) do not.
    """
    leaves = [x for x in jax.tree.leaves(model, is_leaf=is_named) if is_named(x)]
    count = 0
    for leaf in leaves:
        dims = {name: size for name, size in leaf.shape.items() if name != "layers"}
        if len(dims) > 1 and not {"vocab", "pos"} & set(dims):
            met = model.config.experts_per_token / model.config.experts if "experts" in dims else 1
            count += round(math.prod(leaf.shape.values()) * met)
    head = model.unembedding.shape
    return count + model.config.vocab * math.prod(size for name, size in head.items() if name != "vocab")


def flops_per_token(model: Any, length: int, *, causal: bool = True) -> float:
    """Floating-point operations of training on one token: forward once, backward twice.

    Six for each parameter that multiplies activations, and attention's two products over `length` keys, of which a
    causal model needs half (the count of PaLM, Chowdhery et al., 2022, appendix B, has them all). Document masks and
    sliding windows, which leave out more, are not counted.

    Args:
        model: a model or its abstract tree, with `config`.
        length: positions of a sequence.
        causal: whether only the causal half of attention counts.
    """
    config = model.config
    head_dim = getattr(config, "head_dim", config.embed // config.heads)
    attention = 12 * config.layers * config.heads * head_dim * length
    return 6 * matmul_parameters(model) + attention / (2 if causal else 1)


def known_peak(devices: Sequence[Any], dtype: str) -> float | None:
    """FLOP/s that all devices could do together.

    On a CPU it is measured, and the best measurement of this machine is kept in the user's cache folder: a machine that
    is busy with something else measures too little.

    Args:
        devices: the run's.
        dtype: what the run computes in.
    """
    peak = matmul_peak(devices, dtype)
    if peak is None or devices[0].platform != "cpu":
        return peak
    path = cache_folder() / "peaks.json"
    key = f"{platform.node()}, {os.cpu_count()} cores, {dtype}"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = {}
    if peak > found.get(key, 0.0):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found | {key: peak})
    return max(peak, found.get(key, 0.0))
