"""A run's compiled step, held against its ledger before anybody trusts it."""

import time
from pathlib import Path
from typing import Any

from trellis.errors import UserError
from trellis.figures.numbers import duration
from trellis.inspect import Ledger, Structure, structure_of
from trellis.inspect.ledger import ledger_of
from trellis.train.assemble import Assembled
from trellis.train.summary import step_program


class StructureCheck:
    """Matches each program that a run compiles with the ledger of its step, and keeps what it found.

    A fault is told and kept, and does not end the run: what a compiler does and this check does not know is likelier
    than a wrong program, and `trellis prove` decides between the two.

    Args:
        assembled: the run.
        ledger: of its first batches' step.
        folder: the run's folder, which gets the program of a fault.
    """

    def __init__(self, assembled: Assembled, ledger: Ledger, folder: Path):
        self._assembled, self._ledger, self._folder = assembled, ledger, folder
        self.found: list[dict[str, Any]] = []

    def __call__(self, program: Any, step: int) -> str:
        """What is to be told of a program: one line, or four parts of a fault.

        Args:
            program: a `jax.stages.Compiled`.
            step: how many steps were made before it.
        """
        try:
            return self._check(program.as_text(), step)
        except Exception as error:  # a form of text that no compiler wrote before, a full disk: no reason to stop
            return (
                f"matched  nothing of the ledger with the compiled program: {str(error) or type(error).__name__:.300}"
            )

    def _check(self, text: str, step: int) -> str:
        started = time.monotonic()
        found = structure_of(self._ledger_at(step), text, self._assembled.layout.mesh)
        seconds = time.monotonic() - started
        self.found.append(found.as_dict() | {"step": step, "seconds": seconds})
        with open(self._folder / "ledger.txt", "a", encoding="utf-8") as file:
            file.write(f"\nstep {step + 1}: {found}\n")
        return self._line(found, seconds) if found.right else self._fault(found, text)

    def _ledger_at(self, step: int) -> Ledger:
        """The ledger of a step, whose batch may have another size than the first one's, or another length."""
        first, batch = (self._assembled.abstract_batch(at).tokens.shape for at in (0, step))
        same = batch == first and self._assembled.at(step) is self._assembled
        return self._ledger if same else ledger_of(step_program(self._assembled, step))

    def _line(self, found: Structure, seconds: float) -> str:
        if not found.matches and not found.collectives:
            return ""
        return f"matched  {found.line} ({duration(seconds)})"

    def _fault(self, found: Structure, text: str) -> str:
        path = self._folder / "compiled.hlo"
        path.write_text(text, encoding="utf-8")
        error = UserError(
            "A compiled step moves what its types say, between the devices along their mesh axes.",
            seen="; ".join(found.faults),
            where=str(path),
            fix="hold its numbers against one device (trellis prove RECIPE --on TARGET); if they are wrong, report the "
            "program, and train with another layout or version of JAX",
        )
        return f"WARNING: {error}"
