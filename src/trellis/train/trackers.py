"""Where a run's numbers go: JSON lines always; TensorBoard and Weights & Biases as extras."""

import json
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trellis.errors import UserError, did_you_mean
from trellis.files import naming, write_whole

Line = Mapping[str, float | int | None]


class Tracker(Protocol):
    """Takes a run's lines and texts. A new tracker is these three methods and a name in `open_trackers`."""

    def log(self, line: Line) -> None:
        """Takes one line: `step` and the numbers of that step; None if a number is not known or not finite."""

    def text(self, name: str, step: int, text: str) -> None:
        """Takes a text that belongs to a step, such as a sample."""

    def close(self) -> None:
        """Writes what is left."""


class JsonLines:
    """`metrics.jsonl`: one object a line, each on disk when `log` returns; and `samples.jsonl` beside it.

    Args:
        path: the file; lines of steps after `step` are cut off, as is a half-written last line.
        step: the step that the run resumes from; 0 begins anew.
    """

    def __init__(self, path: Path, step: int = 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._texts = path.with_name("samples.jsonl")
        kept = _cut(path, step, int | float | None)
        self._step = kept[-1]["step"] if kept else None
        self._newest = (_cut(self._texts, step, str) or [{}])[-1]
        self._path, self._file = path, open(path, "a")

    def log(self, line: Line) -> None:
        with naming(self._path):
            if (step := int(line["step"] or 0)) == self._step:  # the last line anew, with what was measured since
                self._file.close()
                _cut(self._path, step - 1, int | float | None)
                self._file = open(self._path, "a")
            self._step = step
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()

    def text(self, name: str, step: int, text: str) -> None:
        line = {"step": step, "name": name, "text": text}
        if line == self._newest:
            return  # a run that had ended, and was started again
        self._newest = line
        with naming(self._texts), open(self._texts, "a") as file:
            file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._file.close()


def _cut(path: Path, step: int, of: Any) -> list[dict]:
    """Keeps only the lines up to `step`, and returns them."""
    kept = [line for line in read_lines(path, of) if line["step"] <= step]
    if path.exists():
        write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def read_lines(path: Path, of: Any = int | float | None) -> list[dict]:
    """The lines of a `metrics.jsonl`, oldest first. A last line that a killed run left half written is skipped.

    Args:
        path: the file.
        of: the type of what a line has beside its step; `str` for a `samples.jsonl`.

    Raises:
        UserError: another line is damaged.
    """
    lines = []
    texts = path.read_text("utf-8", errors="replace").splitlines() if path.exists() else []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            line["step"] = operator.index(line["step"])
            if not all(isinstance(value, of) for name, value in line.items() if name != "step"):
                raise TypeError
            lines.append(line)
        except (ValueError, TypeError, KeyError):
            if number < len(texts):
                rest = "texts" if of is str else "numbers"
                raise UserError(
                    f"Every line of `{path.name}` must be a JSON object with a step and {rest}.",
                    seen=f"{text:.60}",
                    where=f"{path}, line {number}",
                    fix="remove the line",
                ) from None
    return lines


class TensorBoard:
    """Event files for TensorBoard, under `folder`. Needs the extra `tensorboard`."""

    def __init__(self, folder: Path, step: int = 0):
        self._writer = _need("tensorboardX", "tensorboard").SummaryWriter(str(folder), purge_step=step + 1)

    def log(self, line: Line) -> None:
        for name, value in line.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, line["step"])

    def text(self, name: str, step: int, text: str) -> None:
        self._writer.add_text(name, text, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases. It writes offline, into the run's folder, unless the environment variable WANDB_MODE says
    otherwise. Needs the extra `wandb`.

    Args:
        folder: the run's folder, whose name becomes the run's. A resumed run keeps the same id.
        config: the resolved run, as plain values.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any] | None = None):
        wandb = _need("wandb", "wandb")
        id_file = folder / "wandb-id"
        if not (id_file.exists() and id_file.read_text().strip()):
            write_whole(id_file, os.urandom(4).hex())
        self._wandb = wandb
        self._run = wandb.init(
            project="trellis",
            name=folder.name,
            dir=str(folder),
            config=dict(config or {}),
            id=id_file.read_text().strip(),
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),
        )

    def log(self, line: Line) -> None:
        values = {name: value for name, value in line.items() if name != "step" and value is not None}
        self._run.log(values, step=line["step"])

    def text(self, name: str, step: int, text: str) -> None:
        self._run.log({name: self._wandb.Html(f"<pre>{_escape(text)}</pre>")}, step=step)

    def close(self) -> None:
        self._run.finish()


def open_trackers(
    names: Sequence[str], folder: Path, *, step: int = 0, config: Mapping[str, Any] | None = None
) -> list[Tracker]:
    """The trackers of a run: JSON lines, and those that are named (`tensorboard`, `wandb`).

    Args:
        names: the extra ones.
        folder: the run's folder.
        step: the step that the run resumes from.
        config: the resolved run, as plain values.
    """
    known = {"tensorboard": lambda: TensorBoard(folder / "tensorboard", step), "wandb": lambda: WandB(folder, config)}
    for name in names:
        if name not in known:
            raise UserError(
                "A tracker must have a known name.", seen=name, where="trackers", fix=did_you_mean(name, known)
            )
    extras = [known[name]() for name in names]
    return [JsonLines(folder / "metrics.jsonl", step), *extras]


def _need(module: str, extra: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(
            "The package of a tracker must be installed.",
            seen=f"no module `{module}`",
            where="trackers",
            fix=f"pip install 'trellis[{extra}]', or leave the tracker out",
        ) from None


def _escape(text: str) -> str:
    import html

    return html.escape(text)
