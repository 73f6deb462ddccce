"""Costs by which a GPU's compiler schedules a step, from types: each instruction's time, before anything has run.

XLA puts collectives beside computation by guesses, and about a kernel it can guess nothing, so it puts a gather of
megabytes beside an addition, and nothing beside the kernel that follows. If it is given a profile of a run, it uses
that instead (`xla_gpu_pgle_profile_file_or_directory_path`; JAX's documentation calls this profile-guided latency
estimation). A plan knows as much: the same file is written here from the estimates by which a step is judged.
"""

import hashlib
import shlex
from pathlib import Path

from trellis.errors import UserError
from trellis.figures import numbers
from trellis.hardware.chips import Target
from trellis.inspect.replay import LOOPS
from trellis.plan.compile import compile_program
from trellis.plan.estimates import Estimates, estimates
from trellis.plan.prepared import Prepared
from trellis.plan.quick import Plan
from trellis.plan.verdict import Verdict, judge
from trellis.train.compilation import COSTS

# A new schedule gives some instructions new names, which a file does not have; so there are further rounds.
MOST_ROUNDS = 3


def costs_text(known: Estimates) -> str:
    """The costs of a compiled step's instructions, in microseconds, as text of XLA's `ProfiledInstructionsProto`."""
    costs: dict[str, float] = {}
    for instruction, _, _ in known.program.walk(fusions=False, load=known.load):
        if instruction.name in costs or instruction.op in LOOPS and not instruction.op.endswith("-start"):
            continue
        sent = [known.sending[name] for name in known.names_of(instruction) if name in known.sending]
        costs[instruction.name] = sum(s.seconds for s in sent) if sent else known.computing(instruction)
    return "".join(f'costs {{ name: "{name}" cost_us: {1e6 * cost:.3f} }}\n' for name, cost in costs.items())


def schedule_by_costs(plan: Plan, prepared: Prepared, verdict: Verdict, folder: str | Path) -> Verdict:
    """Compiles a step again, scheduled by its own estimates, until that saves nothing more.

    Args:
        plan: the plan of the step.
        prepared: the step, on its compiler's devices.
        verdict: the verdict on the step compiled without costs.
        folder: where files of costs are written. Their names contain a hash of their contents, so that a cached program
            was scheduled by the file that its options name.

    Returns:
        The fastest verdict; the one without costs if none is faster. Its options name the file.

    Raises:
        UserError: the target's compiler takes no costs.
    """
    check_takes_costs(plan.target)
    best = now = verdict
    given: set[Path] = set()
    written: set[Path] = set()
    for _ in range(MOST_ROUNDS if verdict.compiled.text else 0):
        text = costs_text(estimates(plan, now.compiled.text, prepared.layout.mesh))
        path = _path(text, folder, prepared.run.name)
        if path in given:
            break
        given.add(path)
        if not path.exists():
            _write(path, text)
            written.add(path)
        options = {**verdict.compiled.options, COSTS: str(path)}
        now = judge(plan, prepared, compile_program(prepared, plan.target, options=options, progress=True))
        if now.seconds is None or not now.compiled.fits:
            break
        if best.seconds is None or now.seconds < best.seconds:
            best = now
    for path in written - {Path(best.compiled.options.get(COSTS, ""))}:
        path.unlink()
    return best


def check_takes_costs(where: Target) -> None:
    """Refuses targets whose compiler takes no costs.

    Raises:
        UserError: the compiler is not that of GPUs.
    """
    if where.chip.kind != "gpu":
        rule = "Costs can be used only with the compiler of GPUs; a TPU's has its own."
        raise UserError(rule, seen=where.name, where="--costs", fix="leave it out")


def costs_said(first: Verdict, best: Verdict) -> str:
    """The outcome of scheduling by costs, as text, with the option to give if it is faster."""
    if best is first or best.seconds is None:
        return "scheduled by costs: no faster: as above"
    than = (
        "it did not fit without"
        if first.seconds is None
        else f"{1 - best.seconds / first.seconds:.1%} less than without"
    )
    words = f"{numbers.seconds(best.seconds)}, {than}; train and plan with"
    # By its own name: the run's other options stay.
    return f"scheduled by costs: {words}\n  --compiler_options.{COSTS} {shlex.quote(best.compiled.options[COSTS])}"


def _path(text: str, folder: str | Path, name: str) -> Path:
    return Path(folder).resolve() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.pbtxt"


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        rule = "The folder for costs must be writable."
        raise UserError(rule, seen=str(error), where="--costs", fix="name a folder that you can write to") from None
