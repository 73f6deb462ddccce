"""Why a compiled program is wrong: which pass of its compiler made it so, and the first value that parts ways."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trellis.inspect.hlo import parse_program
from trellis.proof.interpreter import Failed, Faulty, Interpreter, NotInterpreted
from trellis.proof.marks import Place, first_apart, first_unlike, place_of, recorded
from trellis.proof.passes import Snapshot, first_wrong, partitioned, snapshots

Arrays = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Where a program goes wrong.

    Attributes:
        culprit: what made it wrong, in a sentence.
        place: the first value that is not what it was before that; None if none was found.
        turn: of the innermost loop around it, counted from 1.
        right, wrong: the programs before and after, for whoever fixes the compiler; empty if there is no such pair.
    """

    culprit: str
    place: Place | None = None
    turn: int = 1
    right: str = ""
    wrong: str = ""


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A program to look into.

    Attributes:
        lowered: what `jax.jit(f).trace(...).lower(...)` returned.
        options: the compiler's.
        compiled: the compiled program's text.
        wholes: its arguments as whole arrays.
        parts: its arguments as devices hold them, `device dim ...` each.
        results: the shapes of its results on a device.
        devices: how many there are.
        is_right: whether results, `device dim ...` each, are what they should be.
        are_right: the same for whole results.
    """

    lowered: Any
    options: Mapping[str, str]
    compiled: str
    wholes: Arrays
    parts: Arrays
    results: Sequence[tuple[int, ...]]
    devices: int
    is_right: Callable[[Arrays], bool]
    are_right: Callable[[Arrays], bool]


def find(suspect: Suspect) -> Finding:
    """Looks for what made a program wrong; its compiler runs once more, and about ten of its programs are executed."""
    with snapshots(suspect.lowered, suspect.options) as made:
        return _found(suspect, made)


def _found(suspect: Suspect, made: Sequence[Snapshot]) -> Finding:
    first = partitioned(made, [part.shape[1:] for part in suspect.parts], suspect.results)
    right, wrong = first_wrong(made[first:], lambda snapshot: _holds(suspect, snapshot.text))
    if right is None and wrong is None:
        return Finding("no program between the compiler's passes could be read: its result is wrong, the cause unknown")
    if right is None:
        return _before(suspect, made[:first], wrong)
    after = wrong.text if wrong else suspect.compiled
    pair = recorded(right.text, suspect.parts, suspect.devices), recorded(after, suspect.parts, suspect.devices)
    apart = first_apart(*pair)
    by = f"the compiler's pass {wrong.name}" if wrong else f"the compiler, after its pass {right.name}"
    culprit = f"{by}, made it wrong: the program before it is right"
    if apart is None:
        return Finding(culprit, None, 1, right.text, after)
    mark, turn = apart
    return Finding(culprit, place_of(mark.instruction, parse_program(after)), turn + 1, right.text, after)


def _holds(suspect: Suspect, text: str) -> bool:
    try:
        return suspect.is_right(Interpreter(text, suspect.devices)(suspect.parts))
    except Faulty:
        return False


def _before(suspect: Suspect, made: Sequence[Snapshot], wrong: Snapshot | None) -> Finding:
    """What is wrong in the first program of one device: the partitioner made it so, or it was so before."""
    for snapshot in reversed(made):
        try:
            results = Interpreter(snapshot.text, suspect.devices)(suspect.wholes)
        except (NotInterpreted, Failed, ValueError):
            continue
        if not suspect.are_right(results):
            return Finding("the program is wrong as it was written: on whole arrays, before anything is partitioned")
        marks = (
            recorded(snapshot.text, suspect.wholes, suspect.devices),
            recorded(wrong.text, suspect.parts, suspect.devices),
        )
        mark = first_unlike(*marks, suspect.devices)
        place = place_of(mark.instruction, parse_program(wrong.text)) if mark else None
        culprit = "the compiler's partitioner made it wrong: the program on whole arrays, before it, is right"
        return Finding(culprit, place, 1, snapshot.text, wrong.text)
    return Finding("it is wrong as soon as it is partitioned, by the partitioner or as it was written")
