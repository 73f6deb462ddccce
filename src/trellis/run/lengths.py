"""Sequences that become longer in the middle of a run: its phases, each a run of one length."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Generator
from typing import TYPE_CHECKING, NamedTuple

from trellis.choices import check_choices
from trellis.errors import UserError
from trellis.nn import Scaling
from trellis.run.schema import at_least

if TYPE_CHECKING:
    from trellis.run.config import BatchSize, Run


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLength:
    """Another sequence length, from one step on."""

    step: int
    """The first step with this length, counted from 0. Choose the one where the loss on short sequences falls
    slowly."""
    length: int
    """Tokens in a sequence. Raise it over the run: early steps learn as much from short sequences, which cost less."""
    batch_size: int | None = None
    """Sequences in a step; null keeps the tokens of a step, so that sequences of twice the length come in batches of
    half the size. Set it to have more tokens in a step than before, or fewer."""
    microbatches: int | None = None
    """Parts of a batch; null keeps the run's. Lower it if there are fewer sequences to cut into parts."""
    rope_theta: float | None = None
    """The base of the rotary frequencies from here on; null keeps it. Raise it with the length."""
    rope_scaling: Scaling | None = None
    """How rotary frequencies are changed from here on; null keeps it. Set it if the length is many times that of the
    phase before."""

    def __post_init__(self):
        check_choices(self)
        at_least(1, step=self.step, length=self.length, batch_size=self.batch_size, microbatches=self.microbatches)
        if self.rope_theta is not None and not self.rope_theta > 0:
            fix = "use a positive number, as in 500000.0"
            raise UserError("`rope_theta` must be positive.", seen=self.rope_theta, where="lengths.rope_theta", fix=fix)


class Phase(NamedTuple):
    """Steps with sequences of one length, from `start` to before `stop`, and the run as it is in them."""

    start: int
    stop: int
    run: "Run"


def phases(run: "Run") -> tuple[Phase, ...]:
    """The phases of a run; a run of one length is its only one.

    Raises:
        UserError: lengths are not in the order of steps, or rows cannot be cut into them; or a phase is not a valid
            run.
    """
    return _several(run) if run.lengths else (Phase(0, run.steps, run),)


@functools.lru_cache(maxsize=16)
def _several(run: "Run") -> tuple[Phase, ...]:
    """The phases, kept because every step asks for them."""
    _check(run)
    found, starts = [], [0, *(entry.step for entry in run.lengths), run.steps]
    change: dict = {"length": run.data.sequence_length}
    for start, stop, entry in zip(starts, starts[1:], (None, *run.lengths), strict=False):
        with as_of_phase(start):
            if entry is not None:
                kept = ("rope_theta", "rope_scaling")
                given = {name: getattr(entry, name) for name in kept if getattr(entry, name) is not None}
                change |= given | {"length": entry.length}
            found.append(Phase(start, stop, _run_of(run, start, stop, entry, change)))
    return tuple(found)


@contextlib.contextmanager
def as_of_phase(start: int) -> Generator[None]:
    """Within it, errors about a phase name its entry in `lengths`; the first phase has none."""
    try:
        yield
    except UserError as error:
        if not start:
            raise
        fix = error.fix.replace("--data.sequence_length", "a length of")
        fix = fix.replace("use --batch_size", "give this length a batch_size of")
        seen = f"{error.seen}, from step {start} on"
        raise UserError(error.rule, seen=seen, where="lengths", fix=fix) from None


def _check(run: "Run") -> None:
    starts = [entry.step for entry in run.lengths]
    if starts != sorted(set(starts)) or starts[-1] >= run.steps:
        raise UserError(
            "Lengths must be listed in order of their first steps, which must be before the run ends.",
            seen=f"steps {', '.join(map(str, starts))} of {run.steps}",
            where="lengths",
            fix="write [{step: 1000, length: 4096}, {step: 2000, length: 32768}], and set --steps past the last; "
            "--until pauses a run earlier",
        )
    lengths = [run.data.sequence_length, *(entry.length for entry in run.lengths)]
    if odd := [n for n in lengths if max(lengths) % n]:
        raise UserError(
            "Every length must divide the longest: shorter sequences are cut from the same rows.",
            seen=f"{odd[0]} and {max(lengths)}",
            where="lengths",
            fix=f"use {(n := max(lengths) // odd[0] * odd[0])} or {n + odd[0]} instead of {max(lengths)}, or powers "
            "of 2",
        )
    if len(set(lengths)) > 1 and run.data.packing != "concatenate":
        raise UserError(
            "Several sequence lengths need concatenated documents: all lengths are cut from the same rows.",
            seen=f"data.packing={run.data.packing}, lengths {', '.join(map(str, lengths))}",
            where="lengths",
            fix="use --data.packing concatenate, or one length",
        )


def _run_of(run: "Run", start: int, stop: int, entry: SequenceLength | None, change: dict) -> "Run":
    rope = {name: value for name, value in change.items() if name != "length"}
    if missing := [name for name in rope if not hasattr(run.model, name)]:
        raise UserError(
            "Rotary frequencies can be changed only in a model that has them.",
            seen=f"{missing[0]} for a {run.model.family}",
            where="lengths",
            fix="leave it out, or use a model that has it: llama, qwen3 or a mixture of experts",
        )
    size, parts = entry and entry.batch_size, entry and entry.microbatches
    return dataclasses.replace(
        run,
        lengths=(),
        data=dataclasses.replace(run.data, sequence_length=change["length"]),
        model=dataclasses.replace(run.model, **rope),
        batch_size=size or _sizes(run, start, stop, change["length"]),
        microbatches=parts or run.microbatches,
    )


def _sizes(run: "Run", start: int, stop: int, length: int) -> "int | tuple[BatchSize, ...]":
    """The batch sizes of the run from `start` to `stop`, for sequences of this length: a step keeps its tokens."""
    found = []
    sizes = run.batch_sizes()
    for entry, following in zip(sizes, (*sizes[1:], None), strict=True):
        if entry.step >= stop or (following is not None and following.step <= start):
            continue
        size, rest = divmod(entry.size * run.data.sequence_length, length)
        if rest:
            least = length // math.gcd(length, run.data.sequence_length)
            raise UserError(
                "Without a batch_size of its own, a new length must keep the number of tokens in a step.",
                seen=f"{entry.size} sequences of {run.data.sequence_length} tokens, and a length of {length}",
                where="lengths",
                fix=f"give this length a batch_size, or use multiples of {least} for the run's",
            )
        found.append(dataclasses.replace(entry, step=entry.step if entry.step > start else 0, size=size))
    return found[0].size if len(found) == 1 else tuple(found)
