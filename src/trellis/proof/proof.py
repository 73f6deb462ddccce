"""A compiled program, executed here and compared with what it should compute."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trellis.errors import UserError
from trellis.hardware.chips import Target
from trellis.hardware.local import free_memory
from trellis.inspect import Ledger, Structure, structure_of
from trellis.plan.compile import Compiled, compile_lowered
from trellis.proof.comparing import BOUND, Output, compare
from trellis.proof.finding import Finding, Suspect, find
from trellis.proof.interpreter import Failed, Faulty, Interpreter, NotInterpreted, most_bytes
from trellis.proof.interpreter.written import Written
from trellis.proof.placing import cut, sharding_of


@contextlib.contextmanager
def interpreted(where: str, fix: str) -> Generator[None]:
    """Within it, something in a program that the interpreter does not know is an error like others, and so is a
    program that devices would not come to the end of.

    Args:
        where: which program, for the message.
        fix: what else can be done.
    """
    try:
        yield
    except (NotInterpreted, Failed) as error:
        raise UserError(
            "The interpreter of compiled programs must know every operation of a program.",
            seen=str(error),
            where=where,
            fix=fix,
        ) from error
    except Faulty as error:
        raise UserError(
            "Every device must take part in all collectives of its groups.",
            seen=str(error),
            where=where,
            fix="move collectives, and operations with one in their gradient, out of branches and loops that devices "
            "choose for themselves",
        ) from error


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One result that a program should have.

    Attributes:
        name: its path.
        value: the whole array.
        type: in the notation, or empty.
        before: what it is made from by a small change, if it is.
        outliers: the share of its entries that may deviate: see `compare`.
        within: the share of the bound that it has to stay within.
        least: its largest entry with fewer bits, all of which may be rounding.
    """

    name: str
    value: np.ndarray
    type: str = ""
    before: np.ndarray | None = None
    outliers: float = 0.0
    within: float = 1.0
    least: float = 0.0


@dataclasses.dataclass(frozen=True)
class Subject:
    """A program to be proven, with numbers to run it on.

    Attributes:
        name: of the run or the function.
        target: the hardware that it is compiled for.
        mesh: the target's devices.
        lowered: `jax.stages.Lowered`, for these devices.
        options: of the compiler.
        given: its arguments as whole arrays, flat.
        places: where each of them lies.
        wanted: its results.
        ledger: of the function.
    """

    name: str
    target: Target
    mesh: Mesh
    lowered: Any
    options: Mapping[str, str]
    given: Sequence[np.ndarray]
    places: Sequence[NamedSharding]
    wanted: Sequence[Wanted]
    ledger: Ledger

    def compile(self, *, progress: bool = False) -> Compiled:
        """What the target's compiler makes of it.

        Raises:
            UserError: the compiler refuses it, or it does not fit a device.
        """
        given = {"name": self.name, "options": self.options, "progress": progress}
        try:
            compiled = compile_lowered(self.lowered, self.target, **given)
        except RuntimeError as error:
            raise self._refused(str(error)[:1000], "see the compiler's message") from error
        if not compiled.text:
            raise self._refused(f"{self.name} does not fit a device", "prove it on a larger target")
        return compiled

    def _refused(self, seen: str, fix: str) -> UserError:
        where = f"the compiler for {self.target.name}"
        return UserError("A program must compile before it can be executed.", seen=seen, where=where, fix=fix)

    def parts(self, compiled: Compiled) -> list[np.ndarray]:
        """The arguments that the compiled program has, as devices hold them."""
        return [cut(self.given[i], self.places[i]) for i in compiled.kept]

    def compare(self, found: Sequence[np.ndarray], places: Sequence[NamedSharding], bound: float) -> tuple[Output, ...]:
        """Compares results, `device dim ...` each, with what they should be."""
        return tuple(
            compare(
                wanted.name,
                result,
                wanted.value,
                place,
                type=wanted.type,
                before=wanted.before,
                outliers=wanted.outliers,
                bound=bound * wanted.within,
                least=wanted.least,
            )
            for wanted, result, place in zip(self.wanted, found, places, strict=True)
        )

    def execute(
        self,
        compiled: Compiled,
        *,
        text: str | None = None,
        bound: float = BOUND,
        wide: type = np.float32,
        rounds: bool = True,
        written: Written | None = None,
    ) -> "Proof":
        """Executes the compiled program, or another one with the same arguments and results, and compares.

        Args:
            compiled: it.
            text: the other one's.
            bound: what deviations may be.
            wide: what floats are held in.
            rounds: whether what becomes whole numbers of eight bits is rounded.
            written: constants that stand in for those that the compiler rounded.
        """
        interpreter = Interpreter(text or compiled.text, self.mesh.size, wide=wide, rounds=rounds, written=written)
        parts = self.parts(compiled)
        self._fits(most_bytes(interpreter, parts))
        found, fault = (), ""
        try:
            found = tuple(interpreter(parts))
        except Faulty as error:
            fault = str(error)
        outputs = () if fault else self.compare(found, self.results(compiled), bound)
        kernels = tuple(sorted(interpreter.opaque))
        matched = structure_of(self.ledger, text or compiled.text, self.mesh)
        return Proof(
            name=self.name,
            target=self.target.name,
            mesh=dict(self.mesh.shape),
            outputs=outputs,
            kernels=kernels,
            fault=fault,
            compiled=compiled,
            results=found,
            structure=matched,
            unrounded=bool(interpreter.unrounded),
            written=written is not None and written.used,
        )

    def _fits(self, needed: int) -> None:
        """Refuses what this machine has no memory for.

        Raises:
            UserError: it is more than what is free.
        """
        if needed > (free := free_memory()):
            raise UserError(
                "The values of all devices must fit in this machine's memory.",
                seen=f"{needed / 2**30:.1f} GiB at its peak, {free / 2**30:.1f} GiB free",
                where=f"{self.name} on {self.target.name}, {self.mesh.size} devices",
                fix="prove it on a smaller target, or on a machine with more memory",
            )

    def results(self, compiled: Compiled) -> list[NamedSharding]:
        """Where the compiled program's results lie.

        Raises:
            UserError: the type of one of them does not say.
        """
        for wanted, place in zip(self.wanted, compiled.results):
            if place is None:
                raise UserError(
                    "Results that are compared must have a sharding in their types.",
                    seen=f"`{wanted.name}` of {self.name}",
                    where="prove",
                    fix="give it an out_sharding, or reshard it before it is returned",
                )
        return [sharding_of(place["sliced"], place["pending"], self.mesh) for place in compiled.results]

    def why(self, compiled: Compiled, bound: float = BOUND) -> Finding:
        """Looks for what made the compiled program wrong."""
        whole = [NamedSharding(self.mesh, PartitionSpec())] * len(self.wanted)
        places = self.results(compiled)
        right = lambda found, places: all(output.right for output in self.compare(found, places, bound))
        return find(
            Suspect(
                lowered=self.lowered,
                options=self.options,
                compiled=compiled.text,
                wholes=[self.given[i][None] for i in compiled.kept],
                parts=self.parts(compiled),
                results=[place.shard_shape(wanted.value.shape) for wanted, place in zip(self.wanted, places)],
                devices=self.mesh.size,
                is_right=lambda found: right(found, places),
                are_right=lambda found: right(found, whole),
            )
        )


@dataclasses.dataclass(frozen=True)
class Proof:
    """What executing a compiled program showed.

    Attributes:
        name: of the run or the function.
        target: the hardware that it was compiled for.
        mesh: mesh axes and their sizes.
        outputs: every result, in the program's order.
        kernels: opaque kernels for which a reference stood in.
        fault: why the program could not run to its end, if it could not: devices that wait for each other.
        compiled: what was executed.
        results: what it computed, `device dim ...` each.
        structure: the function's ledger, matched with its collectives.
        rounded: how far the step for one device, as it is written, is from float32, if results are compared with it.
        rounding: the largest deviation in float32, if it is more than may be, and floats of 64 bits, with which this
            proof is then made, show that it is rounding.
        unrounded: whether what becomes whole numbers of eight bits is held as the floats that it is made of.
        written: whether constants that the compiler rounded are held as they are written.
        unknown: what the interpreter does not know of the step for one device, as it is written, if it does not.
        between: whether a token stands between two experts, so that two right programs may be far apart.
        finding: what made it wrong, if it is.
        fitted: how the run was changed for the target, a sentence each.
        left_out: what the run asks for and is not proven, a sentence each.
        seconds: how long each part took.
    """

    name: str
    target: str
    mesh: Mapping[str, int]
    outputs: tuple[Output, ...]
    kernels: tuple[str, ...]
    fault: str
    compiled: Compiled
    results: tuple[np.ndarray, ...]
    structure: Structure
    rounded: float | None = None
    rounding: float | None = None
    unrounded: bool = False
    written: bool = False
    unknown: str = ""
    between: bool = False
    finding: Finding | None = None
    fitted: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def proven(self) -> bool:
        """Whether every result is right on every device."""
        return not self.fault and all(output.right for output in self.outputs)

    @property
    def error(self) -> float:
        """The largest deviation of any result."""
        return math.inf if self.fault else max((output.error for output in self.outputs), default=0.0)

    def __str__(self) -> str:
        """What the command prints."""
        from trellis.proof.report import text

        return text(self)

    @property
    def largest(self) -> list[Output]:
        """The results by their deviations, the largest first."""
        return sorted(self.outputs, key=lambda output: -output.error)


class Watch:
    """How long the parts of something take."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def note(self, part: str) -> None:
        """The end of a part."""
        now = time.monotonic()
        self.seconds[part], self._last = now - self._last, now
