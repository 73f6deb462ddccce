"""What a token costs: the FLOPs that utilisation (MFU) is counted with."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax

from trellis.hardware.peak import matmul_peak
from trellis.hardware.remembered import devices_here, recall, remember
from trellis.mesh.platform import are_cpus
from trellis.models import FamilyConfig, LanguageModel
from trellis.models.protocol import value_dim, windows
from trellis.named import is_named
from trellis.nn import Role, parameters
from trellis.nn.attention.pattern import Pattern
from trellis.train.assemble import Assembled
from trellis.train.metrics import Work


def num_parameters(model: LanguageModel) -> int:
    """The number of parameters of a model or its abstract tree, without the padding of its vocabulary."""
    true = {"vocab": model.config.vocab}
    leaves = [x for x in jax.tree.leaves(model, is_leaf=is_named) if is_named(x)]
    return sum(math.prod(min(n, true.get(name, n)) for name, n in leaf.shape.items()) for leaf in leaves)


def matmul_parameters(model: LanguageModel) -> int:
    """The number of parameters that multiply activations, in a model or its abstract tree.

    These are the weights, by their declared role; of experts' weights, those that a token meets. The unembedding counts
    without its padding rows, whether it is a weight of its own or also the table that tokens are looked up in.
    """
    head, config, count = model.unembedding, model.config, 0
    for parameter in parameters(model):
        if parameter.role == Role.WEIGHT and parameter.leaf is not head:
            met = config.experts_per_token / config.experts if "experts" in parameter.names else 1
            count += round(parameter.size * met)
    return count + config.vocab * math.prod(size for name, size in head.shape.items() if name != "vocab")


def flops_per_token(model: LanguageModel, length: int, *, causal: bool = True) -> float:
    """Floating-point operations of training on one token: forward once, backward twice.

    It is six for each parameter that multiplies activations, plus attention's two products over `length` keys. A causal
    model needs half of these (the count of PaLM, Chowdhery et al., 2022, appendix B, has them all), and a layer with a
    window less. Document masks, which leave out more, are not counted.

    Args:
        model: a model or its abstract tree, with `config`.
        length: positions of a sequence.
        causal: whether only the causal half of attention and what windows show is counted.
    """
    keys = keys_seen(model.config, length) if causal else model.config.layers * length
    return 6 * matmul_parameters(model) + 6 * attention_width(model.config) * keys


@functools.lru_cache(maxsize=64)
def keys_seen(config: FamilyConfig, length: int) -> float:
    """How many keys a query sees in all layers together, averaged over a sequence.

    Args:
        config: what defines the model.
        length: positions of a sequence.
    """
    return sum(Pattern(window=window).pairs(length, length) for window in windows(config)) / length


def attention_width(config: FamilyConfig) -> int:
    """The width of attention's two products, for all heads together: that of queries and that of values."""
    return config.heads * (config.head_dim + value_dim(config))


def known_peak(devices: Sequence[Any], dtype: str) -> float | None:
    """The FLOP/s that all devices could do together.

    On a CPU it is measured, and the best measurement of this machine is kept in the user's cache folder: on a machine
    that is busy with something else, too little is measured.

    Args:
        devices: the run's devices.
        dtype: the type that the run computes in.
    """
    peak = matmul_peak(devices, dtype)
    if peak is None or not are_cpus(devices):
        return peak
    key = f"{devices_here(devices)}, {dtype}"
    found = recall("peaks").get(key, 0.0)
    if peak > found:
        remember("peaks", key, peak)
    return max(peak, found)


def costs(assembled: Assembled) -> dict[str, float]:
    """What a token of a run costs at the first of its sequence lengths, as fields of `Work`."""
    model, length = assembled.abstract.model, assembled.run.data.sequence_length
    return {
        "flops_per_token": flops_per_token(model, length),
        "noncausal_flops_per_token": flops_per_token(model, length, causal=False),
    }


def work_of(assembled: Assembled) -> Work:
    """What a token of a run costs at the first of its sequence lengths, and what its devices could do."""
    devices = list(assembled.layout.mesh.devices.flat)
    peak = lambda: known_peak(devices, assembled.run.precision.compute)
    return Work(
        **costs(assembled),
        peak_flops=peak(),
        measure_again=peak if are_cpus(devices) else None,
    )
