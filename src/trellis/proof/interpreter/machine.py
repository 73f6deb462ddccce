"""An interpreter of optimized HLO: what a compiler made for devices that are not here, executed on this machine.

All devices' programs run in step, one operation after the other, with numpy; a collective is a function over what the
devices hold. It knows no JAX and shares no code with XLA, so that what it finds is not XLA's own opinion.
"""

import contextlib
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence

import numpy as np
from threadpoolctl import threadpool_limits

from trellis.inspect.collective import KINDS
from trellis.inspect.hlo import Instruction, Program, parse_program
from trellis.proof.interpreter import (
    collectives,
    control,
    custom,
    elementwise,
    moving,
    products,
    reducing,
    solving,
    windows,
)
from trellis.proof.interpreter.layouts import ArrayType, Type, parse_type
from trellis.proof.interpreter.unrounded import unrounded
from trellis.proof.interpreter.values import (
    FOUR_BITS,
    NO_DATA,
    Failed,
    Faulty,
    NotInterpreted,
    Team,
    Value,
    held_as,
    in_four_bits,
)
from trellis.proof.interpreter.whole import mesh_of
from trellis.proof.interpreter.written import Written

OPERATIONS: Mapping[str, Callable] = {
    **elementwise.OPERATIONS,
    **products.OPERATIONS,
    **moving.OPERATIONS,
    **reducing.OPERATIONS,
    **windows.OPERATIONS,
    **solving.OPERATIONS,
    **collectives.OPERATIONS,
    **control.OPERATIONS,
    **custom.OPERATIONS,
}

Observer = Callable[[Instruction, Value, Team], None]


@contextlib.contextmanager
def _named(instruction: Instruction) -> Generator[None]:
    """Reports whatever goes wrong with an operation under its name."""
    try:
        yield
    except (NotInterpreted, Faulty, Failed):
        raise
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__} "
        raise Failed(f"{instruction.op} {instruction.name} of {instruction.type}: {kind}{error}") from error


# What nothing need read: others wait for it, or it runs what others wait for.
_RUN_ANYWAY = (*KINDS, "call", "conditional", "custom-call", "fusion", "parameter", "while")


def _read(instructions: Sequence[Instruction], used: Sequence[Sequence[str]]) -> list[bool]:
    """Which instructions of a computation others read, or run anyway. A compiler leaves out the rest, but before it
    has seen a program, parts of results that nothing reads are still there."""
    wanted, found = set(), []
    for instruction, names in zip(reversed(instructions), reversed(used)):
        start = instruction.op.removesuffix("-start").removesuffix("-done")
        found.append(instruction.root or instruction.name in wanted or start in _RUN_ANYWAY)
        wanted.update(names if found[-1] else ())
    return found[::-1]


class Interpreter:
    """A program, ready to run as often as one likes.

    Args:
        program: its text, printed with large constants, or what `parse_program` made of it.
        num_devices: the devices that it was compiled for; None reads the text's `num_partitions`.
        wide: the type that floats of every width are held in.
        rounds: whether what becomes whole numbers of eight bits is rounded to them (`unrounded`).
        written: the constants that stand in for those that a compiler rounded (`written`); None for none.
        observe: called with each operation's result.

    Raises:
        NotInterpreted: when something runs that the interpreter does not know.
        Faulty: when devices would wait for each other for ever.
    """

    def __init__(
        self,
        program: str | Program,
        num_devices: int | None = None,
        *,
        wide: type | np.dtype = np.float32,
        rounds: bool = True,
        written: Written | None = None,
        observe: Observer | None = None,
    ):
        if num_devices is None and isinstance(program, str):
            found = re.search(r"\bnum_partitions=(\d+)", program)
            num_devices = int(found[1]) if found else 1
        self.mesh = mesh_of(program) if isinstance(program, str) else {}  # of a program that is not partitioned yet
        self.program = parse_program(program) if isinstance(program, str) else program
        self.num_devices = num_devices or 1
        self.wide = np.dtype(wide)
        self.unrounded = frozenset() if rounds else unrounded(self.program)
        self.written = written
        self.observe = observe
        self._plans: dict[str, list] = {}
        self._scalars: set[str] = set()
        self._combiners: dict[str, Callable] = {}
        self.opaque: set[str] = set()  # kernels for which a reference stood in

    def __call__(self, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs the program.

        Args:
            arguments: for each parameter an array `device dim ...`, or with one row where all devices hold the same.

        Returns:
            Its results, likewise.
        """
        parameters = self.parameters(self.program.entry)
        if len(parameters) != len(arguments):
            raise ValueError(f"the program has {len(parameters)} parameters, got {len(arguments)} arguments")
        given = []
        for parameter, value in zip(parameters, arguments):
            shape, dtype = self.type(parameter).shape, self.dtype(parameter)
            if value.shape[1:] != shape or len(value) not in (1, self.num_devices):
                raise ValueError(
                    f"{parameter.name} is {parameter.type} on {self.num_devices} devices, got {value.shape}"
                )
            given.append(elementwise.converted(value, dtype))
        team = Team(np.arange(self.num_devices))
        depth = sys.getrecursionlimit()
        sys.setrecursionlimit(max(depth, 10_000))  # computations within computations
        try:
            # Products here are small: threads of a BLAS library would wait for each other most of the time.
            with np.errstate(all="ignore"), threadpool_limits(1, user_api="blas"):
                found = self.run(self.program.entry, given, team)
        finally:
            sys.setrecursionlimit(depth)
        return list(found) if isinstance(found, tuple) else [found]

    def parameters(self, computation: str) -> list[Instruction]:
        """A computation's parameters, in order."""
        found = [i for i in self.program.computations[computation] if i.op == "parameter"]
        return sorted(found, key=lambda i: int(i.literal))

    def run(self, computation: str, arguments: Sequence[Value], team: Team) -> Value:
        """Runs a computation on some devices."""
        values: dict[str, Value] = {}
        root = None
        for instruction, function, operands, gone in self.plan(computation):
            if function is None:
                found = arguments[int(instruction.literal)]
            else:
                found = self._step(computation, instruction, function, [values[name] for name in operands], team)
            values[instruction.name] = found
            if instruction.root:
                root = found
            for name in gone:
                del values[name]
        return root

    def _step(
        self, computation: str, instruction: Instruction, function: Callable, operands: list, team: Team
    ) -> Value:
        with _named(instruction):
            found = function(operands, team)
        kind = self.type(instruction)
        if isinstance(kind, ArrayType) and kind.dtype not in NO_DATA and computation not in self._scalars:
            if found is None:
                raise NotInterpreted(f"{instruction.name}, what a chip's own generator of random bits leaves")
            made = found.shape[1:] if isinstance(found, np.ndarray) else "another kind of value"
            if made != kind.shape:
                raise Failed(f"{instruction.op} {instruction.name} is {instruction.type}, made {made}")
        if isinstance(kind, ArrayType) and kind.dtype in FOUR_BITS:
            found = in_four_bits(found, kind.dtype)
        if self.observe is not None and computation not in self._scalars:
            self.observe(instruction, found, team)
        return found

    def plan(self, computation: str) -> list[tuple[Instruction, Callable | None, list[str], list[str]]]:
        """The operations of a computation: how each is made, from what, and what is not needed after it."""
        if computation not in self._plans:
            instructions = self.program.computations[computation]
            used = [self._inputs(i, computation) for i in instructions]
            read = _read(instructions, used)
            used = [names for names, is_read in zip(used, read) if is_read]
            instructions = [instruction for instruction, is_read in zip(instructions, read) if is_read]
            last = {name: index for index, names in enumerate(used) for name in names}
            plan = []
            for index, (instruction, names) in enumerate(zip(instructions, used)):
                gone = [name for name in dict.fromkeys(names) if last[name] == index]
                if instruction.name not in last:
                    gone.append(instruction.name)
                with _named(instruction):
                    function = None if instruction.op == "parameter" else self.prepared(instruction)
                plan.append((instruction, function, names, gone))
            self._plans[computation] = plan
        return self._plans[computation]

    def _inputs(self, instruction: Instruction, computation: str) -> list[str]:
        """Names of what an operation reads."""
        if instruction.op in ("constant", "parameter"):
            return []
        names = list(instruction.operands)
        return names + custom.more_inputs(instruction, {i.name: i for i in self.program.computations[computation]})

    def prepared(self, instruction: Instruction) -> Callable:
        """An operation, its attributes read once, as a function from its operands' values and the team to its own."""
        make = OPERATIONS.get(instruction.op)
        if make is None:
            endings = [m for ending, m in control.ENDINGS.items() if instruction.op.endswith(ending)]
            if not endings:
                raise NotInterpreted(f"the operation {instruction.op}, as {instruction.name}")
            make = endings[0]
        return make(instruction, self)

    # ------------------------------------------------------------- what operations ask

    @staticmethod
    def type(instruction: Instruction) -> Type:
        """An operation's type."""
        return parse_type(instruction.type)

    def operand_types(self, instruction: Instruction) -> list[Type]:
        """The types of an operation's operands."""
        return [self.type(self.program.by_name[name]) for name in instruction.operands]

    def held(self, dtype: str) -> np.dtype:
        """The numpy type that an element type is held in."""
        return held_as(dtype, self.wide)

    def dtype(self, instruction: Instruction) -> np.dtype:
        """The numpy type that an operation's elements are held in; for several arrays, the first's."""
        kind = self.type(instruction)
        while isinstance(kind, tuple):
            kind = kind[0]
        return self.held(kind.dtype)

    def typed(self, x: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """A result in its type; whole numbers that are made of floats which were not rounded stay floats."""
        unrounded = self.unrounded and dtype.kind == "i" and x.dtype.kind == "f"
        return x.astype(self.wide if unrounded else dtype, copy=False)

    @staticmethod
    def integers(instruction: Instruction, name: str) -> tuple[int, ...]:
        """An attribute's integers, such as those of `dimensions={0,2}`."""
        return tuple(int(n) for n in re.findall(r"-?\d+", instruction.attribute(name) or ""))

    def combiner(self, computation: str) -> Callable:
        """A computation of scalars as a function of arrays: numpy's own if it is one operation."""
        if computation not in self._combiners:
            self._combiners[computation] = self._combiner(computation)
        return self._combiners[computation]

    def _combiner(self, computation: str) -> Callable:
        calls = self.program.computations[computation]
        self._scalars |= {
            computation,
            *(self.program.homes[i.name] for call in calls for i in self.program.inside(call)),
        }
        inner = [i for i in self.program.computations[computation] if i.op not in ("convert", "bitcast", "copy")]
        made = [i for i in inner if i.op != "parameter"]
        if len(inner) == 3 and len(made) == 1 and made[0].op in elementwise.COMMUTATIVE:
            return elementwise.BINARY[made[0].op]
        root = self.program.root(computation)
        if not made and root is not None and root.op == "parameter" and root.literal == "1":
            return reducing.later
        alone = Team(np.arange(1))

        def combine(*arrays: np.ndarray) -> Value:
            return self.run(computation, arrays, alone)

        return combine
