"""Compares a run's compiled step with its ledger before anybody trusts it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trellis._compat import full_text
from trellis.checkpoints.checkpoints import LastGood
from trellis.errors import UserError
from trellis.figures.numbers import duration
from trellis.inspect import Ledger, Structure, structure_of
from trellis.inspect.ledger import ledger_of
from trellis.train.assemble import Assembled
from trellis.train.distributed import is_first
from trellis.train.stopping import ProgramDiffers
from trellis.train.summary import step_program


class StructureCheck:
    """Matches each program that a run compiles with the ledger of its step, and keeps what it found.

    A certain fault ends the run, in all of its processes, before another step is made or anything is saved, unless
    `guard.structure` is false. A row of the ledger for which nothing was found is only reported: the compiler is more
    likely to do it in a way that this check does not know than to be wrong, and `trellis prove` decides between the
    two.

    Args:
        assembled: the run.
        ledger: that of the step for its first batches.
        folder: the run's folder, which gets the program of a fault.
    """

    def __init__(self, assembled: Assembled, ledger: Ledger, folder: Path):
        self._assembled, self._ledger, self._folder = assembled, ledger, folder
        self.found: list[dict[str, Any]] = []

    def __call__(self, program: Any, step: int, last_good: Callable[[], LastGood]) -> str:
        """What to report about a program: one line, or the four parts of a fault.

        Args:
            program: a `jax.stages.Compiled`, or its text with all tables (`full_text`).
            step: how many steps were made before it.
            last_good: gives words about the last good checkpoint.

        Raises:
            ProgramDiffers: the program does not do what its types say.
        """
        try:
            return self._check(full_text(program), step, last_good)
        except ProgramDiffers:
            raise
        except Exception as error:  # text of an unknown form, a full disk: no reason to stop
            return f"matched  no row of the ledger with the compiled program: {str(error) or type(error).__name__:.300}"

    def _check(self, text: str, step: int, last_good: Callable[[], LastGood]) -> str:
        started = time.monotonic()
        found = structure_of(self._ledger_at(step), text, self._assembled.layout.mesh)
        seconds = time.monotonic() - started
        self.found.append(found.as_dict() | {"step": step, "seconds": seconds})
        if is_first():
            with open(self._folder / "ledger.txt", "a", encoding="utf-8") as file:
                file.write(f"\nstep {step + 1}: {found}\n")
        if found.right:
            return self._line(found, seconds)
        path = self._folder / "compiled.hlo"
        if is_first():
            path.write_text(text, encoding="utf-8")
        fault = {
            "rule": "A compiled step must move what its types say, between the devices along their mesh axes.",
            "seen": "; ".join(found.faults),
        }
        fix = "compare its numbers with one device (trellis prove RECIPE --on TARGET); if they are"
        if found.certain and self._assembled.run.guard.structure:
            fix = f"{fix} right, continue with --guard.structure false; else use another layout or version of JAX"
            raise ProgramDiffers(**fault, where=f"{path}; {last_good()}", fix=fix)
        fix = f"{fix} wrong, report the program, and train with another layout or version of JAX"
        return f"WARNING: {UserError(**fault, where=str(path), fix=fix)}"

    def _ledger_at(self, step: int) -> Ledger:
        """The ledger of a step, whose batch may differ from the first one in size or length."""
        first, batch = (self._assembled.abstract_batch(at).tokens.shape for at in (0, step))
        same = batch == first and self._assembled.at(step) is self._assembled
        return self._ledger if same else ledger_of(step_program(self._assembled, step))

    def _line(self, found: Structure, seconds: float) -> str:
        if not found.matches and not found.collectives:
            return ""
        return f"matched  {found.line} ({duration(seconds)})"
