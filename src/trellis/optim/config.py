"""The configuration of optimizers and schedules. Learning rates are peaks, which schedules scale."""

import dataclasses
from typing import Literal

import numpy as np

from trellis.choices import check_choices
from trellis.errors import UserError


def _check(holds: bool, rule: str, name: str, value: object, fix: str) -> None:
    if not holds:
        raise UserError(rule, seen=f"{name}={value}", where=name, fix=fix)


def _check_rates(learning_rate: float, weight_decay: float) -> None:
    check_peak(learning_rate)
    _check(
        weight_decay >= 0, "Weight decay cannot be negative.", "weight_decay", weight_decay, "use 0.1, or 0 for none"
    )


def _check_decay(name: str, value: float) -> None:
    rule = "The decay of a moving average must be at least 0 and below 1, in float32 too."
    _check(0 <= value and is_below_one(value), rule, name, value, "try 0.95")


def is_below_one(decay: float) -> bool:
    """Whether a decay is below 1 as devices compute with it: 0.99999999 is 1 in float32, and an average would stop.

    >>> is_below_one(0.9999999), is_below_one(0.99999999)
    (True, False)
    """
    return bool(np.float32(decay) < 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019, arXiv:1711.05101)."""

    kind: Literal["adamw"] = "adamw"
    learning_rate: float
    """Peak learning rate. Change it first of all: lower it if the loss jumps, raise it if it falls smoothly."""
    beta1: float = 0.9
    """Decay of the moving average of gradients. Lower it a little if batches are very large; otherwise it rarely
    matters."""
    beta2: float = 0.95
    """Decay of the moving average of squared gradients. Lower it, say to 0.9, if the loss spikes or batches are large;
    raise it, say to 0.99, for small batches."""
    epsilon: float = 1e-8
    """Added to the root of the second moment. Raise it if gradients are tiny and updates are not."""
    weight_decay: float = 0.1
    """Each step shrinks every decayed parameter by this times the learning rate. Raise it if validation loss ends well
    above training loss; set 0 for short runs."""

    def __post_init__(self):
        check_choices(self)
        _check_rates(self.learning_rate, self.weight_decay)
        _check_decay("beta1", self.beta1)
        _check_decay("beta2", self.beta2)
        _check(self.epsilon > 0, "Epsilon must be positive.", "epsilon", self.epsilon, "use 1e-8")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lion:
    """The sign of a moving average (Chen et al., 2023, arXiv:2302.06675)."""

    kind: Literal["lion"] = "lion"
    learning_rate: float
    """Peak learning rate; about a third to a tenth of AdamW's. Change it first of all: lower it if the loss jumps,
    raise it if it falls smoothly."""
    beta1: float = 0.9
    """Weight of the moving average in the sum whose sign is the update. Lower it if the loss spikes."""
    beta2: float = 0.99
    """Decay of the moving average. Raise it for small batches."""
    weight_decay: float = 0.3
    """Each step shrinks every decayed parameter by this times the learning rate. Raise it if validation loss ends well
    above training loss; set 0 for short runs."""

    def __post_init__(self):
        check_choices(self)
        _check_rates(self.learning_rate, self.weight_decay)
        _check_decay("beta1", self.beta1)
        _check_decay("beta2", self.beta2)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Muon:
    """Orthogonalized momentum for matrices (Jordan et al., 2024), AdamW for everything else.

    Matrices are all weights but the unembedding (see `trellis.optim.muon`). Embeddings are not among them.
    """

    kind: Literal["muon"] = "muon"
    learning_rate: float
    """Peak learning rate of both rules. Updates of matrices are scaled to the size of AdamW's (`update_rms`). Change
    it first of all: lower it if the loss jumps, raise it if it falls smoothly."""
    beta: float = 0.95
    """Decay of the momentum. Lower it to 0.9 for short runs."""
    nesterov: bool = True
    """Whether the update looks one step ahead along the momentum. Set false to compare with plain momentum."""
    iterations: int = 5
    """Newton-Schulz iterations. Lower it if the optimizer takes a large part of a step."""
    update_rms: float = 0.2
    """Root mean square of a matrix's update before the learning rate (Liu et al., 2025, arXiv:2502.16982). Change it
    only together with the learning rate: it scales the same updates."""
    adam_beta1: float = 0.9
    """For parameters that are not matrices: decay of the moving average of gradients. Leave it, unless embeddings learn
    worse than the rest."""
    adam_beta2: float = 0.95
    """For parameters that are not matrices: decay of the moving average of squared gradients. Lower it, say to 0.9, if
    the loss spikes or batches are large; raise it, say to 0.99, for small batches."""
    epsilon: float = 1e-8
    """Added to norms and to the root of the second moment. Raise it if gradients are tiny and updates are not."""
    weight_decay: float = 0.1
    """Each step shrinks every decayed parameter by this times the learning rate. Raise it if validation loss ends well
    above training loss; set 0 for short runs."""

    def __post_init__(self):
        check_choices(self)
        _check_rates(self.learning_rate, self.weight_decay)
        for name in ("beta", "adam_beta1", "adam_beta2"):
            _check_decay(name, getattr(self, name))
        rule = "Newton-Schulz must iterate at least once, and at most 100 times."
        _check(1 <= self.iterations <= 100, rule, "iterations", self.iterations, "use 5")
        _check(self.update_rms > 0, "The size of an update must be positive.", "update_rms", self.update_rms, "use 0.2")
        _check(self.epsilon > 0, "Epsilon must be positive.", "epsilon", self.epsilon, "use 1e-8")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Adafactor:
    """Second moments of each matrix as row and column sums (Shazeer and Stern, 2018, arXiv:1804.04235).

    A matrix has `embed` as one side and all else, such as heads and their widths, as the other. Those of a stack, of
    layers or experts, are treated one by one (see `trellis.optim.adafactor`).
    """

    kind: Literal["adafactor"] = "adafactor"
    learning_rate: float
    """Peak learning rate. Change it first of all: lower it if the loss jumps, raise it if it falls smoothly."""
    beta1: float | None = None
    """Decay of the moving average of updates; null keeps none, and takes no memory. Set it, say to 0.9, if there is
    memory for a copy of the parameters."""
    decay_exponent: float = 0.8
    """The second moment's decay at step t is 1 - t^-decay_exponent. Lower it if the loss spikes."""
    min_factored_size: int = 128
    """Both sides of a matrix must reach this length, without the padding of a vocabulary, for its second moment to be
    factored. Raise it if small matrices learn badly."""
    clip_update_rms: float | None = 1.0
    """The root mean square of an update is clipped to this, for each matrix or vector of a stack by itself. Lower it
    if the loss jumps."""
    weight_decay: float = 0.1
    """Each step shrinks every decayed parameter by this times the learning rate. Raise it if validation loss ends well
    above training loss; set 0 for short runs."""

    def __post_init__(self):
        check_choices(self)
        _check_rates(self.learning_rate, self.weight_decay)
        if self.beta1 is not None:
            _check_decay("beta1", self.beta1)
        rule = "The exponent of the decay must be above 0 and at most 1."
        _check(0 < self.decay_exponent <= 1, rule, "decay_exponent", self.decay_exponent, "use 0.8")
        rule = "A length must be positive."
        _check(self.min_factored_size >= 1, rule, "min_factored_size", self.min_factored_size, "use 128")
        if self.clip_update_rms is not None:
            rule = "The size to clip updates to must be positive."
            _check(self.clip_update_rms > 0, rule, "clip_update_rms", self.clip_update_rms, "use 1.0, or null for none")


Optimizer = AdamW | Lion | Muon | Adafactor


def _check_warmup(steps: int) -> None:
    _check(steps >= 0, "A number of steps cannot be negative.", "warmup_steps", steps, "use 0 for no warmup")


def _check_final(fraction: float) -> None:
    rule = "The final learning rate must be a fraction of the peak, from 0 to 1."
    _check(0 <= fraction <= 1, rule, "final_fraction", fraction, "use 0.1")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """The peak learning rate after a linear warmup."""

    kind: Literal["constant"] = "constant"
    warmup_steps: int
    """Steps from 0 to the peak. Raise it if the loss jumps early, or the learning rate is high."""

    def __post_init__(self):
        check_choices(self)
        _check_warmup(self.warmup_steps)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear warmup, then a straight line down to the last step."""

    kind: Literal["linear"] = "linear"
    warmup_steps: int
    """Steps from 0 to the peak. Raise it if the loss jumps early, or the learning rate is high."""
    final_fraction: float = 0.0
    """Learning rate at the last step, as a fraction of the peak. Raise it for a run that will be continued after its
    last step."""

    def __post_init__(self):
        check_choices(self)
        _check_warmup(self.warmup_steps)
        _check_final(self.final_fraction)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cosine:
    """A linear warmup, then half a cosine down to the last step (Loshchilov and Hutter, 2017, arXiv:1608.03983)."""

    kind: Literal["cosine"] = "cosine"
    warmup_steps: int
    """Steps from 0 to the peak. Raise it if the loss jumps early, or the learning rate is high."""
    final_fraction: float = 0.1
    """Learning rate at the last step, as a fraction of the peak. Raise it for a run that will be continued after its
    last step."""

    def __post_init__(self):
        check_choices(self)
        _check_warmup(self.warmup_steps)
        _check_final(self.final_fraction)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WSD:
    """Warmup, stable, decay (Hu et al., 2024, arXiv:2404.06395): a straight line down over the last `decay_steps`."""

    kind: Literal["wsd"] = "wsd"
    warmup_steps: int
    """Steps from 0 to the peak. Raise it if the loss jumps early, or the learning rate is high."""
    decay_steps: int
    """Steps from the peak to the final learning rate; they end with the run. Raise it for a better end, to a tenth or a
    fifth of the run."""
    final_fraction: float = 0.0
    """Learning rate at the last step, as a fraction of the peak. Raise it for a run that will be continued after its
    last step."""

    def __post_init__(self):
        check_choices(self)
        _check_warmup(self.warmup_steps)
        _check_final(self.final_fraction)
        rule = "The decay must take at least one step."
        _check(self.decay_steps >= 1, rule, "decay_steps", self.decay_steps, "use a tenth of the run's steps")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InverseSqrt:
    """A linear warmup, then the peak times sqrt(warmup_steps / step) (Vaswani et al., 2017, arXiv:1706.03762)."""

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    warmup_steps: int
    """Steps from 0 to the peak, and the time scale of the decay. Raise it if the loss jumps early, or the learning rate
    is high."""

    def __post_init__(self):
        check_choices(self)
        rule = "An inverse square root needs a warmup of at least one step."
        _check(self.warmup_steps >= 1, rule, "warmup_steps", self.warmup_steps, "use 1 or more")


Schedule = Constant | Linear | Cosine | WSD | InverseSqrt


def check_fits(schedule: Schedule, steps: int) -> None:
    """Refuses a schedule whose parts do not fit into a run of this many steps: it would skip some of them.

    Raises:
        UserError: warmup and decay take more steps than there are.
    """
    warmup, decay = schedule.warmup_steps, schedule.decay_steps if isinstance(schedule, WSD) else 0
    needed = warmup + decay
    if needed > steps and not isinstance(schedule, Constant | InverseSqrt):
        raise UserError(
            "The schedule's warmup and decay must fit into the run.",
            seen=f"schedule.warmup_steps={warmup}{f', schedule.decay_steps={decay}' * bool(decay)}, steps={steps}",
            where="schedule",
            fix=f"use --steps {needed} or more, or shorten schedule.warmup_steps",
        )


def check_clip_norm(clip_norm: float | None) -> None:
    """Refuses a norm to clip gradients to that is not positive: a negative one would turn them around."""
    if clip_norm is not None and not clip_norm > 0:
        fix = "use 1.0, or null for no clipping"
        raise UserError("`clip_norm` must be positive.", seen=clip_norm, where="clip_norm", fix=fix)


def check_peak(peak: float) -> None:
    """Refuses a peak learning rate with which nothing is learned."""
    _check(0 < peak < float("inf"), "A learning rate must be positive.", "learning_rate", peak, "try 0.0003")
