"""When things happened in a run, over all its starts."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

# The ways in which a start of a run ends: at its last step; at a requested step; by a signal; by an error.
ENDS = ("finished", "paused", "interrupted", "stopped")


class Timeline:
    """`timeline.jsonl`: one object for each event, with `time` (Unix seconds), `event`, `step`, and any details.

    Args:
        path: the file, to which later starts of the run add; None writes nothing.
    """

    def __init__(self, path: Path | None):
        self._path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError), open(path, "a+b") as file:
                file.seek(max(0, file.tell() - 1))
                if file.read() not in (b"", b"\n"):  # a note that was cut off: the next one gets a line of its own
                    file.write(b"\n")

    def add(self, event: str, step: int | None, **more: object) -> None:
        """Notes an event: started, resumed, compiled, length, evaluation, checkpoint, slow, or an end (`ENDS`)."""
        if self._path is not None:
            # A run does not end because a note failed; the error of something that it must write will tell why.
            with contextlib.suppress(OSError), open(self._path, "a") as file:
                file.write(json.dumps({"time": time.time(), "event": event, "step": step, **more}) + "\n")


def last_saved(events: list[dict[str, Any]]) -> int | None:
    """The last step of which a checkpoint was finished, so far as events tell; None if they tell of none.

    A save waits for the one before it, and a start that ends in order, or in a signal, for its last. What was being
    saved when a process was killed may not have been finished.
    """
    found, saving = None, None
    for event in events:
        match event["event"]:
            case "checkpoint":
                found, saving = found if saving is None else saving, event["step"]
            case "resumed":
                found, saving = event["step"], None
            case "finished" | "paused" | "interrupted":
                found, saving = found if saving is None else saving, None
            case "started" | "stopped":
                saving = None
    return found


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a `timeline.jsonl`, oldest first, without notes that were cut off, or that no run has written."""
    found = []
    for line in path.read_text("utf-8", errors="replace").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            found += [event] if _is_event(event) else []
    return found


# Numbers that events have beside their time. Until the latest time, the calendar of a system holds.
_NUMBERS = {"compiled": ("seconds",), "length": ("step", "sequence_length")}
_LATEST = 1e11


def _is_event(value: Any) -> bool:
    if not (isinstance(value, dict) and {"time", "event", "step"} <= value.keys()):
        return False
    event, step = value["event"], value["step"]
    if not (isinstance(event, str) and isinstance(step, int | None)):
        return False
    numbers = [value.get(name) for name in ("time", *_NUMBERS.get(event, ()))]
    return all(isinstance(number, int | float) and 0 <= number < _LATEST for number in numbers)
