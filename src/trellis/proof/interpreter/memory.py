"""How much memory executing a program takes, known before anything runs.

A program is walked through as it is executed, with sizes in place of arrays, which live as long as the arrays will.
Loops make one turn.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from trellis.inspect.hlo import Instruction
from trellis.proof.interpreter.layouts import Type
from trellis.proof.interpreter.values import NO_DATA

# Operations that tell the devices apart; all others give the same on all of them if their operands are the same.
_DIFFERS = ("partition-id", "replica-id")


class _Sum:
    """The bytes of all arrays that are alive, and the most that they ever were."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


class _Array:
    """An array's size: for how many devices, and how many bytes."""

    def __init__(self, rows: int, size: int, total: _Sum):
        self.rows, self.size = rows, rows * size
        total.add(self.size)
        weakref.finalize(self, total.add, -self.size)


def most_bytes(machine: Any, given: Sequence[np.ndarray]) -> int:
    """The most memory that values take at any time while a program runs, beside its arguments.

    Args:
        machine: the `Interpreter` of the program.
        given: its arguments.
    """
    total = _Sum()
    arguments = [_Array(len(x), x.nbytes // max(len(x), 1), total) for x in given]
    before = total.now
    _Walk(machine, total).run(machine.program.entry, arguments)
    return total.most - before


class _Walk:
    def __init__(self, machine: Any, total: _Sum):
        self._machine, self._total = machine, total

    def run(self, computation: str, arguments: Sequence[Any]) -> Any:
        values: dict[str, Any] = {}
        root = None
        for instruction, _, names, gone in self._machine.plan(computation):
            if instruction.op == "parameter":
                found = arguments[int(instruction.literal)]
            else:
                found = self._made(instruction, [values[name] for name in names])
            values[instruction.name] = found
            if instruction.root:
                root = found
            for name in gone:
                del values[name]
        return root

    def _made(self, instruction: Instruction, operands: list) -> Any:
        op, called = instruction.op, instruction.called()
        if op == "tuple":
            return tuple(operands)
        if op == "get-tuple-element":
            return operands[0][int(instruction.attribute("index") or 0)]
        if op == "opt-barrier":
            return operands[0]
        if op in ("call", "fusion"):
            (name,) = called.get("calls") or called["to_apply"]
            return self.run(name, operands)
        if op == "while":
            self.run(called["condition"][0], operands)
            return self.run(called["body"][0], operands)
        if op == "conditional":
            names = called.get("branch_computations") or [called[branch][0] for branch in _BRANCHES]
            return [self.run(name, [operand]) for name, operand in zip(names, operands[1:])][0]
        rows = self._machine.num_devices if op in _DIFFERS else max(map(_rows, operands), default=1)
        found = self._fresh(self._machine.type(instruction), rows)
        _Array(1, _size(found), self._total)  # while it is made, there may be a copy of it
        return found

    def _fresh(self, kind: Type, rows: int) -> Any:
        if isinstance(kind, tuple):
            return tuple(self._fresh(part, rows) for part in kind)
        if kind.dtype in NO_DATA:
            return ()
        return _Array(rows, math.prod(kind.shape) * self._machine.held(kind.dtype).itemsize, self._total)


_BRANCHES = ("true_computation", "false_computation")


def _rows(value: Any) -> int:
    return value.rows if isinstance(value, _Array) else max(map(_rows, value), default=1)


def _size(value: Any) -> int:
    return value.size if isinstance(value, _Array) else sum(map(_size, value))
