"""Compares what a program computed on each device with what it should have computed."""

import dataclasses
import math

import numpy as np
from jax.sharding import NamedSharding

from trellis.errors import UserError
from trellis.proof.functions import BOUND
from trellis.proof.placing import cut, settled

# How much a float32 that something small was added to is itself rounded.
_ROUNDING = 2.4e-7


@dataclasses.dataclass(frozen=True)
class Output:
    """One result of a program.

    Attributes:
        name: its path.
        type: in the notation, or its shape.
        error: the largest deviation on any device, as a share of the largest finite entry (for a result that was there
            before, of its largest change).
        bound: what the error may be.
        devices: those whose error is larger.
    """

    name: str
    type: str
    error: float
    bound: float
    devices: tuple[int, ...]

    @property
    def right(self) -> bool:
        """Whether it is what it should be, on every device."""
        return not self.devices


def largest(x: np.ndarray) -> float:
    """The largest finite entry."""
    return float(np.max(np.abs(x), where=np.isfinite(x), initial=0.0))


def compare(
    name: str,
    found: np.ndarray,
    want: np.ndarray,
    sharding: NamedSharding,
    *,
    type: str = "",
    before: np.ndarray | None = None,
    outliers: float = 0.0,
    bound: float = BOUND,
    least: float = 0.0,
) -> Output:
    """Compares a result on all devices with the whole array that it should be.

    Infinities, and entries that are not numbers, have to be where they should be.

    Args:
        name: its path.
        found: `device dim ...`, or one row where all devices hold the same.
        want: `dim ...`.
        sharding: where it lies; of a pending sum, the sum is compared.
        type: in the notation; its shape if empty.
        before: what the result was made from by a small change, if it was; deviations are shares of the change then.
        outliers: which share of the entries may deviate. Rounding decides about the sign of what is nearly zero, and
            where an update is such a sign, about a few of its entries.
        bound: what the deviation may be.
        least: what deviations are shares of at least.

    Raises:
        UserError: it should not be a number anywhere, which every program that computes none would prove.
    """
    if want.dtype.kind in "fc" and want.size and np.isnan(want).all():
        raise UserError(
            "A proof needs a result with numbers.",
            seen=f"{name}: not one entry is a number on one device",
            where="reference",
            fix="give arguments of which the plain program makes numbers, or leave the result out",
        )
    found, sharding = settled(found, sharding)
    parts = cut(want, sharding)
    if want.dtype.kind in "fc":
        wide = np.result_type(want.dtype, np.float64)
        change = want if before is None else want.astype(wide) - before
        scale = max(largest(change), least, 1e-30)
        with np.errstate(invalid="ignore"):  # of two infinities
            off = np.abs(found.astype(wide) - parts) - _ROUNDING * np.abs(parts)
        same = (found == parts) | (np.isnan(found) & np.isnan(parts))
        off = np.where(same, 0.0, np.where(np.isfinite(off), off, np.inf)) / scale
    else:
        off = (found != parts) * 1.0
    rows = off.reshape(len(off), -1)
    allowed = min(int(outliers * rows.shape[1]), rows.shape[1] - 1)
    worst = np.partition(rows, -1 - allowed, axis=1)[:, -1 - allowed] if rows.shape[1] else np.zeros(len(rows))
    bad = np.flatnonzero(~(worst <= bound))
    count = math.prod(sharding.mesh.devices.shape)
    devices = range(count) if len(rows) == 1 and len(bad) else (int(d) for d in bad)
    return Output(name, type or str(list(want.shape)), float(worst.max(initial=0.0)), bound, tuple(devices))
