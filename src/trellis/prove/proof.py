"""A run's step, compiled for hardware that is not here, executed here and held against one device."""

import dataclasses
import math
import time
from collections.abc import Collection, Mapping

import jax
import numpy as np

from trellis.errors import UserError
from trellis.hardware.chips import Target
from trellis.notation.typeof import typeof
from trellis.plan.adapting import adapt
from trellis.plan.compile import Compiled, compile_program, compiler_devices
from trellis.plan.program import Program, program
from trellis.prove.comparing import BOUND, Output, compare
from trellis.prove.interpreter import Faulty, Interpreter
from trellis.prove.one_device import Reference, on_one_device
from trellis.prove.placing import cut, sharding_of
from trellis.prove.shrinking import shrunk
from trellis.run.config import Run
from trellis.run.layouts import LayoutChoice, MeshSizes, make_layout
from trellis.train.assemble import assemble, vocab_multiple
from trellis.train.compilation import options_for

# Of the entries of a parameter so many may deviate: see `compare`.
_OUTLIERS = 1e-5
# So far may a step with constants in bfloat16 be from one in float32.
ROUNDED = 2e-2


@dataclasses.dataclass(frozen=True)
class Proof:
    """What executing a compiled program showed.

    Attributes:
        name: of the run or the function.
        target: the hardware that it was compiled for.
        mesh: mesh axes and their sizes.
        outputs: every result, in the program's order.
        kernels: opaque kernels that a reference stood for.
        fault: why the program could not run to its end, if it could not: devices that wait for each other.
        compiled: what was executed.
        results: what it computed, `device dim ...` each.
        rounded: how far the same step compiled for one device is from the plain one, where this had to be asked.
        fitted: how the run was changed for the target.
        seconds: what took how long.
    """

    name: str
    target: str
    mesh: Mapping[str, int]
    outputs: tuple[Output, ...]
    kernels: tuple[str, ...]
    fault: str
    compiled: Compiled
    results: tuple[np.ndarray, ...]
    rounded: float | None = None
    fitted: tuple[str, ...] = ()
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def proven(self) -> bool:
        """Whether every result is right on every device."""
        return not self.fault and all(output.right for output in self.outputs)

    def as_reference(self, given: Reference) -> Reference:
        """What this program computed on one device, as what another one should compute."""
        return dataclasses.replace(given, results=[result[0] for result in self.results])

    @property
    def error(self) -> float:
        """The largest deviation of any result."""
        return math.inf if self.fault else max((output.error for output in self.outputs), default=0.0)


def prove_run(run: Run, target: Target, given: Collection[str] = (), *, progress: bool = False, seed: int = 0) -> Proof:
    """Proves a run's train step on a target, with the run's sizes shrunk.

    The step is held against the plain one in float32. Where constants that the run has in bfloat16 (those of a GELU, for
    one) keep the two apart, it is held against the same step compiled for one device of the target, as narrowly; and
    that against the plain one, as far as a rounded constant may reach.

    Args:
        run: the run.
        target: the hardware.
        given: dotted names of the run's fields that the user set, which are not fitted to the target.
        progress: show on stderr how long it has been compiling.
        seed: of all numbers.

    Raises:
        UserError: the run does not fit the target, or its compiler is not installed or refuses an option.
        NotInterpreted: the compiled program has something that the interpreter does not know.
    """
    watch = Watch()
    case, fitted = small_case(run, target, given)
    compiled = case.compile(progress=progress)
    watch.note("compiling")
    reference = on_one_device(case.program.run, padding=case.padding, seed=seed)
    watch.note("one device")
    proof = executed(case, compiled, reference)
    watch.note("executing")
    if not proof.proven and proof.error < ROUNDED:
        alone = case.alone()
        single = executed(alone, alone.compile(progress=progress), reference, bound=ROUNDED)
        watch.note("compiling for one device")
        if single.proven:
            proof = dataclasses.replace(executed(case, compiled, single.as_reference(reference)), rounded=single.error)
        watch.note("executing again")
    return dataclasses.replace(proof, fitted=tuple(fitted), seconds=watch.seconds)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step to be proven.

    Attributes:
        program: the step, with abstract arguments on the compiler's devices.
        target: the hardware.
        padding: what its vocabulary is padded to a multiple of.
        chunk_bytes: of the loss.
    """

    program: Program
    target: Target
    padding: int
    chunk_bytes: int | None

    def compile(self, *, progress: bool = False) -> Compiled:
        """What the target's compiler makes of it.

        Raises:
            UserError: it does not fit a device.
        """
        run, target = self.program.run, self.target
        options = options_for(target.chip.kind, run.compiler_options, target.num_devices)
        compiled = compile_program(self.program, target, options=options, progress=progress)
        if not compiled.text:
            raise UserError(
                "A program is executed after it was compiled.",
                seen=f"{run.name} does not fit a device of {target.name} even with shrunk sizes",
                where="--on",
                fix="prove it on a larger target",
            )
        return compiled

    def alone(self) -> "Case":
        """The same step on one of the target's devices."""
        run = dataclasses.replace(self.program.run, mesh=MeshSizes(data=1), layout=LayoutChoice(preset="single"))
        devices = [self.program.layout.mesh.devices.flat[0]]
        made = assemble(run, devices, padding=self.padding, chunk_bytes=self.chunk_bytes)
        batch = made.abstract_batch()
        prog = Program(run, made.layout, made.step, made.abstract, batch, math.prod(batch.shape))
        return dataclasses.replace(self, program=prog)


def small_case(run: Run, target: Target, given: Collection[str] = ()) -> tuple[Case, list[str]]:
    """A run's step with shrunk sizes on a target's devices, and how the run was fitted to these."""
    devices = compiler_devices(target)
    run, fitted = adapt(run, target, given)
    small = shrunk(run, make_layout(run.mesh, run.layout, devices))
    prog = program(small.run, target, devices, chunk_bytes=small.chunk_bytes)
    return Case(prog, target, vocab_multiple(prog.layout), small.chunk_bytes), fitted


def executed(
    case: Case, compiled: Compiled, reference: Reference, *, bound: float = BOUND, text: str | None = None
) -> Proof:
    """Executes a compiled step and compares it.

    Args:
        case: the step.
        compiled: what the compiler made of it.
        reference: what it should compute.
        bound: what deviations may be.
        text: another program to execute instead of the compiled one, of the same arguments and results.
    """
    prog, mesh = case.program, case.program.layout.mesh
    shardings = [leaf.sharding for leaf in jax.tree.leaves((prog.state, prog.batch))]
    arguments = [cut(reference.given[i], shardings[i]) for i in compiled.kept]
    interpreter = Interpreter(text or compiled.text, mesh.size)
    found, fault = [], ""
    try:
        found = interpreter(arguments)
    except Faulty as error:
        fault = str(error)
    types = _types(prog, len(reference.results))
    outputs = tuple(
        compare(
            name,
            result,
            reference.results[index],
            sharding_of(compiled.results[index], mesh),
            type=types[index],
            before=reference.before[index],
            outliers=_OUTLIERS if name.startswith(("model.", "average.")) else 0.0,
            bound=bound,
        )
        for index, (name, result) in enumerate(zip(reference.names, found))
    )
    kernels = tuple(sorted(interpreter.opaque))
    return Proof(prog.run.name, case.target.name, dict(mesh.shape), outputs, kernels, fault, compiled, tuple(found))


def _types(prog: Program, count: int) -> list[str]:
    """The types of the new state, and nothing for the metrics."""
    leaves = jax.tree.leaves(prog.state, is_leaf=lambda x: hasattr(x, "names"))
    return [*map(typeof, leaves), *[""] * (count - len(leaves))]


class Watch:
    """How long the parts of something take."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def note(self, part: str) -> None:
        """The end of a part."""
        now = time.monotonic()
        self.seconds[part], self._last = now - self._last, now


def largest(outputs: tuple[Output, ...]) -> list[Output]:
    """Results by their deviation, the largest first."""
    return sorted(outputs, key=lambda output: -np.nan_to_num(output.error, nan=math.inf))
