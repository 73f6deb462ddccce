"""Compiled programs with one mistake each, as compilers make them: in groups, operations, orders, tables and scales."""

import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from tests.proof.cases import Case
from trellis.hardware.chips import target
from trellis.inspect.hlo import replica_groups, source_target_pairs
from trellis.proof.comparing import BOUND
from trellis.proof.interpreter import Failed, NotInterpreted
from trellis.proof.one_device import on_one_device
from trellis.proof.proof import Proof
from trellis.proof.runs import small_trial
from trellis.recipes import load_run

_MESH = r"mesh\[[^\]]*\](?:, device_ids=\([^)]*\)(?:\))?)? \{[^}]*\}"
_GROUPS = re.compile(r"replica_groups=(\{\{[\d,{}]*\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|" + _MESH + ")")
_PAIRS = re.compile(r"source_target_pairs=(\{\{[\d,{} ]*\}\})")
_COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_ONCE = re.compile(r"^(\s*(?:ROOT )?)%([\w.\-]+) = (\w+\[[^ ]*) all-reduce\(%([\w.\-]+)\)(, .*)$")
_TABLE = re.compile(r"= [su]32\[(\d+)\]\S* constant\(\{([\d, ]+)\}\)")
_SCALED = re.compile(r"= f32\[\d[^ ]* multiply\((%[\w.\-]+), (%[\w.\-]+)\)")

Mutation = tuple[str, str]  # what it is, and the program that has it


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a proof says of a program with a mistake.

    Attributes:
        kind: what the mistake is.
        result: "found"; "nothing changes" where every result is the same to the last bit on every device; "rounding"
            where the deviation from one device is no larger than twice that of the right program; or "missed".
        error: of the program with the mistake, against one device.
        right_error: of the program as it was compiled.
        collective: whether it is in a collective.
        structure: whether the program's structure is wrong, too.
        line: the first line that differs.
    """

    kind: str
    result: str
    error: float
    right_error: float
    collective: bool
    structure: bool
    line: str


# Mistakes that leave the collectives as they are.
ELSEWHERE = ("slices shifted by one shard", "a factor dropped")


def outcomes(case: Case, random: np.random.Generator, most: int) -> Iterator[Outcome]:
    """Proofs of a run with shrunk sizes, compiled for a target and altered in so many ways.

    Texts that are no programs are left out.
    """
    given = dict(option.removeprefix("--").split("=") for option in case.options)
    trial = small_trial(case.run or load_run(case.name, given), target(case.on), tuple(given))
    reference = on_one_device(trial.prepared.run, padding=trial.padding)
    subject, bound = trial.subject(reference), BOUND
    compiled = subject.compile()
    right = subject.execute(compiled)
    if not right.proven:  # a step with constants in bfloat16
        written, rounded, _ = trial.written(reference, compiled)
        subject, bound = trial.subject(written), max(BOUND, rounded / 10)
        right = subject.execute(compiled, bound=bound)
    assert right.proven and right.structure.right, f"{case.name} on {case.on} is not proven as it is"
    for kind, text in mutations(compiled.text, random, most):
        try:
            proof = subject.execute(compiled, text=text, bound=bound)
        except (Failed, NotInterpreted, ValueError):
            continue
        line = next(new for new, old in zip(text.split("\n"), compiled.text.split("\n")) if new != old).strip()
        structure = not proof.structure.right
        yield Outcome(kind, _result(proof, right), proof.error, right.error, kind not in ELSEWHERE, structure, line)


def _result(proof: Proof, right: Proof) -> str:
    if not proof.proven:
        return "found"
    if all(np.array_equal(a, b, equal_nan=True) for a, b in zip(proof.results, right.results, strict=True)):
        return "nothing changes"
    return "rounding" if proof.error <= 2 * right.error else "missed"


def mutations(text: str, random: np.random.Generator, most: int) -> list[Mutation]:
    """So many mistakes at random in a program's text, spread over their kinds."""
    by_kind: dict[str, list[Callable[[], str]]] = defaultdict(list)
    for kind, make in _candidates(text.split("\n"), random):
        by_kind[kind].append(make)
    order = []
    for number, kind in enumerate(random.permutation(sorted(by_kind))):
        random.shuffle(by_kind[kind])
        order += [(place, number, kind, make) for place, make in enumerate(by_kind[kind])]
    return [(kind, make()) for _, _, kind, make in sorted(order, key=lambda entry: entry[:2])[:most]]


def _candidates(lines: list[str], random: np.random.Generator) -> Iterator[tuple[str, Callable[[], str]]]:
    channels: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        if found := _COLLECTIVE.search(line):
            channel = re.search(r"channel_id=(\d+)", line)
            channels.setdefault(f"{found[1]} {channel[1] if channel else number}", []).append(number)
        if (table := _TABLE.search(line)) and len(set(_numbers(table[2]))) > 1:
            yield "slices shifted by one shard", lambda n=number, t=table: _shifted(lines, n, t)
        if _SCALED.search(line):
            yield "a factor dropped", lambda n=number: _with(lines, {n: _unscaled(lines[n])})
        if _ONCE.match(line):
            what = "a maximum" if _is_maximum(lines, line) else "a sum"
            yield f"{what} taken twice", lambda n=number: _with(lines, {n: _doubled(lines[n])})
    for key, numbers in channels.items():
        yield from _of_collective(lines, key.split()[0], numbers, random)


def _of_collective(lines, kind: str, numbers: list[int], random) -> Iterator[tuple[str, Callable[[], str]]]:
    line = lines[numbers[0]]
    if pairs := _PAIRS.search(line):
        moved = source_target_pairs(pairs[1])
        targets = [b for _, b in moved]
        turned = [(a, b) for (a, _), b in zip(moved, targets[1:] + targets[:1])]
        stayed = [(a, a) for a, _ in moved]
        for what, pairs in (("a permute redirected", turned), ("a permute left out", stayed)):
            if pairs != moved:
                yield what, lambda to=pairs: _regrouped(lines, numbers, _PAIRS, "source_target_pairs=", to)
    found = _GROUPS.search(line)
    groups = replica_groups(found[1]) if found else []
    if not groups or len(groups[0]) == 1:
        return
    change = lambda new: lambda: _regrouped(lines, numbers, _GROUPS, "replica_groups=", new)
    if len(groups) > 1:
        swapped = [list(group) for group in groups]
        swapped[0][-1], swapped[1][-1] = swapped[1][-1], swapped[0][-1]
        yield "members of two groups swapped", change(swapped)
    if kind == "all-reduce":
        if (name := _combiner(line)) and " add(" in (text := _computation(lines, name)):
            yield "a maximum for a sum", lambda: _maximized(lines, numbers, name, text)
        yield "a sum left out", change([[device] for group in groups for device in group])
        if len(groups[0]) > 2:
            half = len(groups[0]) // 2
            yield "groups halved", change([part for group in groups for part in (group[:half], group[half:])])
    else:
        yield "the order of a group reversed", change([group[::-1] for group in groups])


def _with(lines: list[str], changed: dict[int, str]) -> str:
    return "\n".join(changed.get(number, line) for number, line in enumerate(lines))


def _regrouped(lines, numbers: list[int], pattern: re.Pattern, name: str, groups) -> str:
    """A collective of other groups, wherever it is repeated."""
    written = name + "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"
    return _with(lines, {number: pattern.sub(written, lines[number]) for number in numbers})


def _doubled(line: str) -> str:
    head, name, type_, operand, rest = _ONCE.match(line).groups()
    first = f"  %{name}.once = {type_} all-reduce(%{operand}){rest}"
    return f"{first}\n{head}%{name} = {type_} all-reduce(%{name}.once){rest}"


def _is_maximum(lines: list[str], line: str) -> bool:
    """Whether a reduction takes the maximum, which may be taken twice."""
    return " maximum(" in _computation(lines, _combiner(line))


def _combiner(line: str) -> str:
    """The name of the computation that a reduction combines two elements with."""
    found = re.search(r"to_apply=(%[\w.\-]+)", line)
    return found[1] if found else ""


def _computation(lines: list[str], name: str) -> str:
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"{name} "))
    return "\n".join([*itertools.takewhile(lambda line: line != "}", lines[begin:]), "}"])


def _maximized(lines: list[str], numbers: list[int], name: str, text: str) -> str:
    """A reduction that takes the maximum where it should add."""
    other = re.sub(r"%([\w.\-]+)", r"%\1.largest", text).replace(" add(", " maximum(")
    entry = next(number for number, line in enumerate(lines) if line.startswith("ENTRY"))
    changed = {number: lines[number].replace(f"to_apply={name}", f"to_apply={name}.largest") for number in numbers}
    return _with(lines, {entry: f"{other}\n\n{lines[entry]}"} | changed)


def _unscaled(line: str) -> str:
    return re.sub(r"multiply\((%[\w.\-]+), %[\w.\-]+\)", r"maximum(\1, \1)", line)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _shifted(lines: list[str], number: int, table: re.Match) -> str:
    values = _numbers(table[2])
    turned = ", ".join(map(str, values[1:] + values[:1]))
    return _with(lines, {number: lines[number].replace("{" + table[2] + "}", "{" + turned + "}")})
