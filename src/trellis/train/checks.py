"""Checks of a traced step that refuse impossible runs: they do not fit, or ask for values that no model marks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from trellis.errors import UserError, did_you_mean
from trellis.figures.numbers import size
from trellis.hardware.local import free_memory
from trellis.mesh.platform import are_cpus, platform_of_devices
from trellis.nn.moe.config import EXPERT_WEIGHTS, FAR_ROWS
from trellis.program import Program
from trellis.program.sizes import local_bytes
from trellis.run.config import Run
from trellis.train.assemble import Assembled
from trellis.train.compilation import ONE_ORDER, asks_for_one_order
from trellis.train.guard import replays

# The memory that is counted for a step may be twice what a compiler needs, but not more.
_CERTAIN = 2


def check_marks(run: Run, program: Program) -> None:
    """Refuses names of kept values that nothing in a step has as a mark, nor would have on another layout.

    Args:
        run: the run.
        program: its traced step.
    """
    known = {operation.mark for operation in program.walk()} - {""}
    known |= {EXPERT_WEIGHTS, FAR_ROWS} if run.model.experts > 1 else set()
    for name in run.remat.names:
        if name not in known:
            rule = "`remat.names` can list only names that the model marks."
            raise UserError(rule, seen=f"`{name}`", where="remat.names", fix=did_you_mean(name, known))


def check_state(assembled: Assembled) -> None:
    """Refuses a run whose state and batch are larger than the memory of this process's devices."""
    leaves = jax.tree.leaves((assembled.abstract, assembled.abstract_batch()))
    _check_room(sum(map(local_bytes, leaves)), assembled.layout.mesh.devices.flat)


def check_step(memory: Mapping[str, int], assembled: Assembled) -> None:
    """Refuses a run whose step takes more memory than there is, whatever the compiler makes of it.

    Args:
        memory: bytes on each device at the step's highest point, by kind.
        assembled: the run.
    """
    _check_room(sum(memory.values()) // _CERTAIN, assembled.layout.mesh.devices.flat)


def check_guard(memory: Mapping[str, int], assembled: Assembled) -> None:
    """Refuses to make steps twice if another state does not fit, or if the same step may give another result.

    Args:
        memory: bytes on each device at the step's highest point, by kind.
        assembled: the run.
    """
    run, mesh = assembled.run, assembled.layout.mesh
    if not replays(run.guard, assembled.abstract, mesh):
        return
    state = sum(map(local_bytes, jax.tree.leaves(assembled.abstract)))
    fix = "use --guard.replay false, which compares copies only, or more devices"
    _check_room(
        sum(memory.values()) // _CERTAIN + state,
        mesh.devices.flat,
        rule="Replaying a step needs memory for another state.",
        fix=fix,
    )
    if platform_of_devices(mesh) == "cuda" and not asks_for_one_order(assembled.compiler_options):
        raise UserError(
            "Replaying a step needs deterministic operations on a GPU: both results must have the same bits.",
            seen=f"guard.every={run.guard.every}, and parts of the state that are held once",
            where="guard.replay",
            fix=f"add --compiler_options.{ONE_ORDER[0]} True, or use --guard.replay false",
        )


def _check_room(
    num_bytes: int,
    devices: Iterable[Any],
    *,
    rule: str = "A run's state and its step must fit in memory.",
    fix: str = "use a smaller model or batch, or more devices; `trellis memory` shows what each device holds",
) -> None:
    here = [device for device in devices if device.process_index == jax.process_index()]
    cpus = are_cpus(here)
    needed, room = num_bytes * len(here), free_memory() if cpus else _limit(here)
    if room is not None and needed > room:
        free = "free on this machine" if cpus else "on them together"
        raise UserError(
            rule,
            seen=f"at least {size(needed)} on {len(here)} x {here[0].device_kind}, {size(room)} {free}",
            where="the run",
            fix=fix,
        )


def _limit(devices: Sequence[Any]) -> int | None:
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    known = [limit for limit in limits if limit is not None]
    return sum(known) if len(known) == len(limits) else None
