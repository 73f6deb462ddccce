"""When things happened in a run, over all its starts."""

import contextlib
import json
import time
from pathlib import Path


class Timeline:
    """`timeline.jsonl`: one object an event, `time` (Unix seconds), `event`, `step`, and what else there is to say.

    Args:
        path: the file, which later starts of the run go on writing; None writes nothing.
    """

    def __init__(self, path: Path | None):
        self._path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, event: str, step: int | None, **more: object) -> None:
        """Notes an event: started, resumed, compiled, length, evaluation, checkpoint, interrupted, stopped, finished or
        slow."""
        if self._path is not None:
            # A run does not end for want of a note; what it needs to write tells why.
            with contextlib.suppress(OSError), open(self._path, "a") as file:
                file.write(json.dumps({"time": time.time(), "event": event, "step": step, **more}) + "\n")
