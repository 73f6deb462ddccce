"""A run of the real trainer that takes seconds: bytes of a made-up text, on a model of 33 thousand parameters."""

import json
from pathlib import Path

from tests.train.forks import Forked, start
from trellis.checkpoints.checkpoints import LastGood
from trellis.commands import line
from trellis.data import FileSource, find_files, tokenize
from trellis.train.trackers import read_lines

RUN = """
base: tiny
model: {{vocab: 257, embed: 32, mlp: 64}}
data:
  source: {{kind: store, path: {stores}/train, validation: {stores}/validation}}
  sequence_length: 32
precision: {{compute: float32}}
steps: 6
checkpoints: {{every: 3}}
evaluation: {{every: 3, batches: 2}}
logging: {{every: 1}}
"""
GOOD = LastGood("last good checkpoint: c", "run the same command again, which continues after that checkpoint")
VOCAB = 257  # a prime: no mesh divides it


def make_run(folder: Path) -> Path:
    """The run's file, with its stores beside it: a few kilobytes of text, each byte a token."""
    for split, texts in {"train": range(40), "validation": range(40, 50)}.items():
        files = []
        for number in texts:
            path = folder / f"{number}.txt"
            path.write_text(f"The number {number} times {number} is {number * number}, and so on.\n" * 12)
            files.append(str(path))
        source = FileSource(files=find_files(files), format="text")
        tokenize(source, str(folder / split), use_bytes=True, workers=1, progress=False)
    path = folder / "run.yaml"
    path.write_text(RUN.format(stores=folder))
    return path


def trellis(capsys, *arguments) -> tuple[int, str, str]:
    """A command's exit code, and what it printed to stdout and stderr."""
    code = line.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def started(*arguments) -> Forked:
    """A command in a process of its own."""
    return start("trellis.commands.line", *arguments)


def curve(folder: Path) -> list[float]:
    """The loss of every step."""
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl")]


def last_line(folder: Path) -> dict:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
