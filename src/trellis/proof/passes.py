"""A program as it was after every pass of its compiler that changed it, and which of them made it wrong.

XLA writes the program out after each pass if it is told to, and so does libtpu. A binary search executes these programs
until it has found one that is right and the next one, which is wrong.
"""

import contextlib
import dataclasses
import re
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trellis.inspect.hlo import parse_program
from trellis.proof.interpreter import Failed, NotInterpreted


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A program between two passes.

    Attributes:
        number: which of the compiler's programs it is.
        name: of the pass that made it, with that of its pipeline.
        path: its file.
    """

    number: int
    name: str
    path: Path

    @property
    def text(self) -> str:
        """The program. There may be hundreds of several megabytes each, so they stay on the disk."""
        return self.path.read_text(encoding="utf-8", errors="replace")


_FILE = re.compile(r"\.(\d{4})\.(.+)\.after_(.+?)(?:\.before_.+)?\.txt$")


@contextlib.contextmanager
def snapshots(lowered: Any, options: Mapping[str, str]) -> Generator[list[Snapshot]]:
    """Compiles a lowered program again, and gives it as it was after each pass that changed it.

    The files exist for as long as the context lasts.

    Args:
        lowered: what `jax.jit(f).trace(...).lower(...)` returned.
        options: the compiler's.
    """
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": ".*"}
        lowered.compile(compiler_options={**options, **dump, "xla_dump_large_constants": True})
        files = {int(found[1]): (found, path) for path in Path(folder).iterdir() if (found := _FILE.search(path.name))}
        largest: dict[str, int] = {}  # a step's program, not those of small functions beside it
        for _, path in files.values():
            module = path.name.split(".")[0]
            largest[module] = largest.get(module, 0) + path.stat().st_size
        mine = max(largest, key=lambda module: largest[module], default="")
        yield [
            Snapshot(number, f"{found[3]} in {found[2]}", path)
            for number, (found, path) in sorted(files.items())
            if path.name.split(".")[0] == mine
        ]


def partitioned(found: Sequence[Snapshot], given: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> int:
    """The first of the programs that is one device's, with parameters and results of the given shapes; their number if
    none is. Results decide if every parameter is whole on each device."""
    for index, snapshot in enumerate(found):
        program = parse_program(snapshot.text)
        entry = program.computations[program.entry]
        parameters = sorted((i for i in entry if i.op == "parameter"), key=lambda i: int(i.literal))
        have = [array.shape for i in parameters for array in i.results]
        made = [array.shape for i in entry if i.root for array in i.results]
        if have == [*given] and made == [*results]:
            return index
    return len(found)


def first_wrong(
    found: Sequence[Snapshot], right: Callable[[Snapshot], bool]
) -> tuple[Snapshot | None, Snapshot | None]:
    """The last program that is right and the next one, which is wrong; None for the former if all are wrong, and for
    the latter if none is.

    Args:
        found: programs that one pass after the other made, one device's all of them.
        right: whether one is; it raises `NotInterpreted` or `Failed` where that is not known.
    """
    low, high = -1, len(found)
    while high - low > 1:
        middle = (low + high) // 2
        for index in sorted(range(low + 1, high), key=lambda i: abs(i - middle)):
            try:
                good = right(found[index])
            except (NotInterpreted, Failed):
                continue
            low, high = (index, high) if good else (low, index)
            break
        else:
            break
    return (found[low] if low >= 0 else None), (found[high] if high < len(found) else None)
