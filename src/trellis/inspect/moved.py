"""What an operation moves beside what it says: one reading, for the ledger's rows and for memory."""

from trellis.mesh.platform import platform_of_abstract
from trellis.program import Operation, Program
from trellis.program.flow import is_empty, uniform, zeros
from trellis.program.manual import COLLECTIVES
from trellis.program.rules import Implied, States


class Moved:
    """The moves that a program's operations imply. They are asked for in order; what was asked before is known.

    Attributes:
        states: where values lie.
    """

    def __init__(self, program: Program):
        merges = platform_of_abstract(program.device) == "tpu"
        self.states = States(program.mesh, merges=merges)
        self.zeros, self.uniform = zeros(program), uniform(program)
        self.known: dict[Operation, list[Implied]] = {}

    def by(self, operation: Operation) -> list[Implied]:
        """The moves that an operation without others inside implies; by hand, none are. A value moves once (on TPUs
        equal values do), and zeros, empty arrays and slices of one known number do not."""
        if operation not in self.known:
            self.known[operation] = self._implied(operation)
        return self.known[operation]

    def _implied(self, operation: Operation) -> list[Implied]:
        merged = self.states.merged(operation)
        if merged or operation.name in COLLECTIVES or self.of_zeros(operation) or self._of_one_number(operation):
            return []
        return [implied for implied in self.states.implied(operation) if implied.move.payload]

    def of_zeros(self, operation: Operation) -> bool:
        """Whether it would move zeros, or what it makes of no elements, which compilers do not."""
        return bool(operation.inputs) and all(value in self.zeros or is_empty(value) for value in operation.inputs)

    def _of_one_number(self, operation: Operation) -> bool:
        """Whether it would move slices of an array that is one known number throughout: each device makes its own."""
        slices = operation.name == "reshard" and not self.states[operation.operands[0]].pending
        return slices and operation.operands[0] in self.uniform
