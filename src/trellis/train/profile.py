"""A profile of a few steps, in files that Perfetto and XProf open."""

from pathlib import Path
from typing import Any

import jax

from trellis.run.config import Profile


class Profiler:
    """Records some steps of a run, or those of them that are left. The loop waits only for the last of these.

    Args:
        folder: where the trace goes; `perfetto_trace.json.gz` in it opens at https://ui.perfetto.dev.
        rule: which steps to record, counted from 0 as the data counts them; None records nothing.
    """

    def __init__(self, folder: Path, rule: Profile | None):
        self._folder, self._rule, self._on = folder, rule, False

    def before(self, index: int) -> None:
        """Call before the step of `index` is dispatched."""
        if self._rule is not None and not self._on and 0 <= index - self._rule.start < self._rule.steps:
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
            self._on = True

    def after(self, index: int, result: Any) -> None:
        """Call after the step was dispatched, with something that it computes. After the last step to record it waits
        for that and writes the files."""
        if self.ends(index, result):
            self.close()

    def ends(self, index: int, result: Any) -> bool:
        """Whether the step of `index`, which was dispatched, is the last to record; if so, waits for what it computes.
        `close` then writes the files, which can take longer than a step."""
        if not self._on or self._rule is None or index != self._rule.start + self._rule.steps - 1:
            return False
        jax.block_until_ready(result)
        return True

    def close(self) -> None:
        """Ends any recording that is under way."""
        if self._on:
            self._on = False
            jax.profiler.stop_trace()
