"""The proof of a run: its own train step on hardware that is not here, compared with the plain step on one device."""

import dataclasses
import math
from collections.abc import Collection

import jax
from jax.sharding import NamedSharding, PartitionSpec

from trellis._compat import full_text
from trellis.hardware.chips import Target
from trellis.inspect.ledger import ledger_of
from trellis.notation.typeof import is_named, typeof
from trellis.plan.adapt import adapt
from trellis.plan.compile import Compiled, compiler_devices, platform_of_target
from trellis.plan.prepared import Prepared, prepare
from trellis.proof.comparing import BOUND
from trellis.proof.interpreter import Failed, Interpreter, NotInterpreted
from trellis.proof.interpreter.unrounded import rounds
from trellis.proof.one_device import Reference, on_one_device
from trellis.proof.proof import Proof, Subject, Wanted, Watch
from trellis.proof.shrinking import shrunk
from trellis.run.config import Run
from trellis.run.layouts import LayoutChoice, MeshSizes, make_layout
from trellis.run.unheeded import check_given
from trellis.train.assemble import assemble, model_axes, vocab_multiple
from trellis.train.compilation import options_for

# The share of a parameter's entries that may deviate: see `compare`.
_OUTLIERS = 1e-5
# The share of the bound that metrics have: right programs have them to the last bits.
_METRICS = 0.25
# How far a step with constants in bfloat16 may be from one in float32.
ROUNDED = 2e-2


def prove_run(
    run: Run,
    target: Target,
    given: Collection[str] = (),
    *,
    explain: bool = True,
    progress: bool = False,
    seed: int = 0,
) -> Proof:
    """Proves a run's train step on a target, with the run's sizes shrunk.

    The step is compared with the plain one in float32. If constants that the run has in bfloat16 (those of a GELU, for
    one) keep the two apart, it is compared with the step for one device as the run writes it, before a compiler has
    seen it, and that one with the plain one, within what rounded constants may do. A tenth of that is allowed between
    the compiled step and the written one: a compiler may multiply constants with each other.

    Args:
        run: the run.
        target: the hardware.
        given: dotted names of the run's fields that the user set, which are not fitted to the target.
        explain: look for what made it wrong where it is, which takes another minute.
        progress: show on stderr how long it has been compiling.
        seed: of all numbers.

    Raises:
        UserError: the run does not fit the target, or its compiler is not installed or refuses an option.
        NotInterpreted: the compiled program has something that the interpreter does not know.
    """
    watch = Watch()
    trial = small_trial(run, target, given)
    watch.note("tracing")
    reference = on_one_device(trial.prepared.run, padding=trial.padding, seed=seed)
    watch.note("one device")
    subject = trial.subject(reference)
    compiled = subject.compile(progress=progress)
    watch.note("compiling")
    proof, bound = subject.execute(compiled), BOUND
    watch.note("executing")
    if not proof.proven and not proof.fault and (exact := _unrounded(subject, compiled)):
        proof = exact
        watch.note("not rounded")
    if not proof.proven and not proof.fault:
        written, rounded, unknown = trial.written(reference, compiled)
        proof = dataclasses.replace(proof, unknown=unknown)
        watch.note("as written")
        if rounded < ROUNDED:
            subject, bound = trial.subject(written), max(BOUND, rounded / 10)
            outputs = subject.compare(proof.results, subject.results(compiled), bound)
            proof = dataclasses.replace(proof, outputs=outputs, rounded=rounded)
    if explain and not proof.proven and not proof.fault:
        proof = dataclasses.replace(proof, finding=subject.why(compiled, bound))
        watch.note("looking for the reason")
    said = {"fitted": trial.fitted, "left_out": trial.left_out}
    return dataclasses.replace(proof, between=reference.between, seconds=watch.seconds, **said)


def _unrounded(subject: Subject, compiled: Compiled) -> Proof | None:
    """The proof without roundings to whole numbers of eight bits, which the step in float32 does not make; None
    if it is none, or if there are no such roundings."""
    if not rounds(compiled.text):
        return None
    try:
        proof = subject.execute(compiled, rounds=False)
    except (Failed, NotInterpreted):
        return None
    return proof if proof.proven else None


@dataclasses.dataclass(frozen=True)
class Trial:
    """A run's step with shrunk sizes.

    Attributes:
        prepared: the step, with abstract arguments on the compiler's devices.
        target: the hardware.
        padding: what its vocabulary is padded to a multiple of.
        chunk_bytes: of the loss.
        fitted: how the run was changed for the target.
        left_out: what the run asks for and the step does without.
    """

    prepared: Prepared
    target: Target
    padding: int
    chunk_bytes: int | None
    fitted: tuple[str, ...]
    left_out: tuple[str, ...]

    def written(self, reference: Reference, compiled: Compiled) -> tuple[Reference, float, str]:
        """What the step for one device computes with the run's own constants, before a compiler has seen it.

        Returns:
            That, how far it is from the reference, and what in it is not interpreted, with which it is infinitely far.
            Of a mixture of experts only metrics are compared: rounded constants lead some tokens to other experts.
        """
        alone = self._alone().subject(reference)
        try:
            run = Interpreter(full_text(alone.lowered), 1)
            results = [result[0] for result in run([reference.given[i][None] for i in compiled.kept])]
        except (Failed, NotInterpreted) as error:
            return reference, math.inf, str(error)
        place = NamedSharding(alone.mesh, PartitionSpec())
        outputs = alone.compare([result[None] for result in results], [place] * len(results), ROUNDED)
        mixture = self.prepared.run.model.experts > 1
        compared = [o.error for o, before in zip(outputs, reference.before) if before is None or not mixture]
        return dataclasses.replace(reference, results=results), max(compared), ""

    def _alone(self) -> "Trial":
        """The same step on one of the target's devices."""
        single = LayoutChoice(preset="single")
        run = dataclasses.replace(self.prepared.run, mesh=MeshSizes(data=1), layout=single, accumulation="pending")
        devices = [self.prepared.layout.mesh.devices.flat[0]]
        made = assemble(run, devices, padding=self.padding, chunk_bytes=self.chunk_bytes)
        batch = made.abstract_batch()
        parts = made.options.microbatches
        prepared = Prepared(run, made.layout, made.step, made.abstract, batch, math.prod(batch.shape), parts)
        return dataclasses.replace(self, prepared=prepared)

    def subject(self, reference: Reference) -> Subject:
        """What is to be proven: the step has the reference's results."""
        prepared, target = self.prepared, self.target
        leaves = jax.tree.leaves(prepared.state, is_leaf=is_named)
        types = [*map(typeof, leaves), *[""] * (len(reference.names) - len(leaves))]
        wanted = [
            Wanted(name, value, type, before, _OUTLIERS if name.startswith(("model.", "average.")) else 0.0)
            for name, value, type, before in zip(
                reference.names, reference.results, types, reference.before, strict=True
            )
        ]
        wanted[len(leaves) :] = [dataclasses.replace(metric, within=_METRICS) for metric in wanted[len(leaves) :]]
        return Subject(
            name=prepared.run.name,
            target=target,
            mesh=prepared.layout.mesh,
            lowered=prepared.lowered(platform_of_target(target)),
            options=options_for(target.chip.kind, prepared.run.compiler_options, target.num_devices),
            given=reference.given,
            places=[leaf.sharding for leaf in jax.tree.leaves((prepared.state, prepared.batch))],
            wanted=wanted,
            ledger=ledger_of(prepared.traced()),
        )


def small_trial(run: Run, target: Target, given: Collection[str] = ()) -> Trial:
    """A run's step with shrunk sizes on a target's devices.

    Args:
        run: the run.
        target: the hardware.
        given: dotted names of the fields that the user set, which are not fitted to the target.
    """
    run, fitted = adapt(run, target, given)
    check_given(run, given)
    devices = compiler_devices(target)
    small = shrunk(run, make_layout(run.mesh, run.layout, devices, model_axes(run.model)))
    prepared = prepare(small.run, target, devices, chunk_bytes=small.chunk_bytes)
    return Trial(prepared, target, vocab_multiple(prepared.layout), small.chunk_bytes, tuple(fitted), small.left_out)
