"""Collectives: functions over all devices of a team at once, so that none waits for another."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from trellis.inspect.hlo import Instruction, source_target_pairs
from trellis.proof.interpreter import elementwise
from trellis.proof.interpreter.item_bytes import sum_of_words
from trellis.proof.interpreter.reducing import Combiner, summed
from trellis.proof.interpreter.values import Faulty, NotInterpreted, Team, Value, spread

Groups = list[np.ndarray]  # places in the team, in the order in which the collective counts them


def groups_of(instruction: Instruction, machine, team: Team) -> Groups:
    """The groups of a collective that runs on a team, as places in it.

    Raises:
        Faulty: a device is in two groups or in none, or waits for one that does not take part.
    """
    listed = instruction.groups() or [tuple(range(machine.num_devices))]
    members = sorted(d for group in listed for d in group)
    if members != list(range(machine.num_devices)):
        raise Faulty(f"{instruction.name}: the groups {listed} do not hold each device once")
    place = {int(d): i for i, d in enumerate(team.devices)}
    mine = [group for group in listed if any(d in place for d in group)]
    for group in mine:
        if missing := [d for d in group if d not in place]:
            raise Faulty(f"{instruction.name}: devices wait for device {missing[0]}, which is not there")
    return [np.array([place[d] for d in group]) for group in mine]


def _by_group(x: np.ndarray, groups: Groups, team: Team, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """What each device gets by a function of what its group's members hold, `"member dim ..."`; one row is for all."""
    rows = spread(x, team)
    found = [function(rows[group]) for group in groups]
    if len(groups) == 1 and len(found[0]) == 1:
        return found[0]
    out = np.empty((len(team), *found[0].shape[1:]), found[0].dtype)
    for group, value in zip(groups, found):
        out[group] = value
    return out


def _gathered(rows: np.ndarray, dim: int) -> np.ndarray:
    """Members' arrays one after the other along a dimension, the same for all."""
    return np.concatenate(list(rows), dim)[None]


def _cut(rows: np.ndarray, dim: int, members: int) -> np.ndarray:
    """One array's pieces along a dimension, one for each member."""
    return np.stack(np.split(rows[0], members, dim))


def _exchanged(rows: np.ndarray, dim: int) -> np.ndarray:
    """Sends each member's pieces along a dimension to the others, and puts the others' pieces in their place."""
    pieces = [np.split(row, len(rows), dim) for row in rows]
    return np.stack([np.concatenate([own[i] for own in pieces], dim) for i in range(len(rows))])


def _listed(kind: Value, found: list[np.ndarray]) -> Value:
    return tuple(found) if isinstance(kind, tuple) else found[0]


def _collective(instruction: Instruction, machine) -> Callable:
    kind, code = machine.type(instruction), instruction.op
    dims = machine.integers(instruction, "dimensions")
    combine: Combiner = machine.combiner(instruction.called()["to_apply"][0]) if instruction.called() else np.add

    def change(rows: np.ndarray) -> np.ndarray:
        if code == "all-gather":
            return _gathered(rows, dims[0])
        if code == "all-to-all":
            return _exchanged(rows, dims[0])
        if code == "collective-broadcast":
            return rows[:1]
        total = _of_words(instruction, machine)(rows) if rows.dtype.names else _combined(rows, combine)
        return total if code == "all-reduce" else _cut(total, dims[0], len(rows))

    def run(values: Sequence[np.ndarray], team: Team) -> Value:
        groups = groups_of(instruction, machine, team)
        if code == "all-to-all" and not dims:
            return _swapped(values, groups, team)
        return _listed(kind, [_by_group(x, groups, team, change) for x in values])

    return run


def _of_words(instruction: Instruction, machine) -> Callable[[np.ndarray], np.ndarray]:
    """What a collective makes of words of several floats: its computation takes these out, and adds each of them."""
    computation = machine.program.computations[instruction.called()["to_apply"][0]]
    floats = {i.op for i in computation if i.type.startswith("f") or i.type.startswith("bf")}
    only = (floats & {*elementwise.BINARY}) or {i.op for i in computation if i.op in elementwise.BINARY}
    if only != {"add"}:
        raise NotInterpreted(f"{instruction.name}, of words of floats, by {', '.join(sorted(only))}")
    return partial(sum_of_words, apart=not floats)


def _combined(rows: np.ndarray, combine: Combiner) -> np.ndarray:
    if isinstance(combine, np.ufunc):
        return summed(rows, 0, combine)[None]
    total = rows[:1]
    for row in rows[1:]:
        total = combine(total, row[None])
    return total


def _swapped(values: Sequence[np.ndarray], groups: Groups, team: Team) -> Value:
    """The all-to-all of several arrays: the i-th goes to the i-th member, and the k-th result is the k-th member's."""
    rows = [spread(v, team) for v in values]
    out = [np.empty_like(r) for r in rows]
    for group in groups:
        for to, member in enumerate(group):
            for k, other in enumerate(group):
                out[k][member] = rows[to][other]
    return tuple(out)


def _permute(instruction: Instruction, machine) -> Callable:
    pairs = source_target_pairs(instruction.attribute("source_target_pairs") or "")
    kind = machine.type(instruction)
    for side in zip(*pairs):
        if len(set(side)) < len(side):
            raise Faulty(f"{instruction.name}: a device sends or receives twice, in {pairs}")

    def run(values: Sequence[np.ndarray], team: Team) -> Value:
        place = {int(d): i for i, d in enumerate(team.devices)}
        moves = [(a, b) for a, b in pairs if a in place or b in place]
        for pair in moves:
            if missing := [d for d in pair if d not in place]:
                raise Faulty(f"{instruction.name}: devices wait for device {missing[0]}, which is not there")
        sent, received = ([place[pair[side]] for pair in moves] for side in (0, 1))

        def moved(x: np.ndarray) -> np.ndarray:
            out = np.zeros((len(team), *x.shape[1:]), x.dtype)
            out[received] = spread(x, team)[sent]
            return out

        return _listed(kind, [moved(x) for x in values])

    return run


def _ragged(instruction: Instruction, machine) -> Callable:
    """Sends rows from where each sender has them to where it says that they go, as many as it says."""

    def run(values: Sequence[np.ndarray], team: Team) -> Value:
        rows, room, begins, counts, targets, _ = (spread(v, team) for v in values)
        out = np.array(room)
        for group in groups_of(instruction, machine, team):
            for sender in group:
                for to, receiver in enumerate(group):
                    first, count, at = (int(x[sender][to]) for x in (begins, counts, targets))
                    if at + count > out.shape[1] or first + count > rows.shape[1]:
                        raise Faulty(f"{instruction.name}: {count} rows from {first} to {at} are out of bounds")
                    out[receiver, at : at + count] = rows[sender, first : first + count]
        return out

    return run


OPERATIONS: dict[str, Callable] = {
    **dict.fromkeys(("all-gather", "all-reduce", "all-to-all", "collective-broadcast", "reduce-scatter"), _collective),
    "collective-permute": _permute,
    "ragged-all-to-all": _ragged,
}
