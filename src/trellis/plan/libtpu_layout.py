"""libtpu's layout of a device's memory, read from its dumps: how much is used, and what is there at the highest point.

A compiled program's own `memory_analysis()` counts what is lost between temporaries twice, and takes what loops carry
for lost (libtpu 0.0.42): for an 8B model it reported 5.0 GiB for a layout of 3.8. A program that does not fit has no
analysis at all. The dump has both, at no cost.
"""

import bisect
import dataclasses
import math
import re
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """One of the buffers in memory at a program's highest point.

    Attributes:
        num_bytes: its size on one device.
        what: dtype and shape.
        source: the operation that made it, as the compiler names it, or the path of an argument.
    """

    num_bytes: float
    what: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryLayout:
    """A device's memory as the compiler laid it out.

    Attributes:
        num_bytes: the total: arguments and the space of temporaries.
        largest: arguments, and temporaries at the highest point, largest first.
    """

    num_bytes: int
    largest: tuple[Allocation, ...]


def dump_options(folder: str | Path) -> dict[str, str]:
    """Compiler options that make libtpu write its memory layout to a folder."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": "True"}


def read_layout(folder: str | Path, most: int = 16) -> MemoryLayout | None:
    """The memory layout in a folder that `dump_options` named; None if the compiler did not get that far."""
    texts = {}
    for kind in ("buffer-assignment", "live-range", ""):
        pattern = f"*after_optimizations{'-' if kind else ''}{kind}.txt"
        found = sorted(Path(folder).glob(pattern), key=lambda path: path.stat().st_size)
        if not found:
            return None
        texts[kind] = found[-1].read_text(encoding="utf-8", errors="replace")
    space, arguments, values = _assignment(texts["buffer-assignment"])
    spans = _spans(texts["live-range"])
    live = _highest([(spans[name], offset, size, what, name) for name, size, offset, what in values if name in spans])
    made = _sources(texts[""])
    temporaries = [Allocation(size, what, made.get(name.partition("{")[0], name)) for size, what, name in live]
    inputs = [Allocation(size, what, made.get(name, f"argument {name}")) for size, what, name in arguments]
    largest = sorted([*temporaries, *inputs], key=lambda allocation: -allocation.num_bytes)[:most]
    return MemoryLayout(space + sum(size for size, _, _ in arguments), tuple(largest))


_VALUE = re.compile(
    r"value: <\d+ ([^\s{]+)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> "  # its name; a tuple's index; (phi) for a loop's
    r"\(size=(\d+),offset=(\d+)\): (\w+\[[\d,]*\])"
)


def _assignment(text: str) -> tuple[int, list[tuple[int, str, str]], list[tuple[str, int, int, str]]]:
    """Reads a buffer assignment: bytes of temporaries, arguments, and the temporaries' values with their places."""
    space, arguments, values = 0, [], []
    for block in re.split(r"^allocation \d+: ", text, flags=re.MULTILINE)[1:]:
        head, _, rest = block.partition("\n")
        size = re.match(r"size (\d+)", head)
        if not size or "color" in head or "thread-local" in head:  # memory other than HBM, or of one operation
            continue
        if "parameter" in head:
            first = re.search(r"value: <\d+ (\S+?)(?:\{[\d,]*\})? @", rest)
            shape = re.search(r"shape \|([^|]*)\|", head)
            arguments.append((int(size[1]), shape[1] if shape else "", first[1] if first else ""))
        elif "preallocated-temp" in head:
            space += int(size[1])
            for m in _VALUE.finditer(rest):
                values.append((f"{m[1]}{{{m[2] or ''}}}", int(m[3]), int(m[4]), m[5]))
        else:
            space += int(size[1])
    return space, arguments, values


def _spans(text: str) -> dict[str, tuple[int, int]]:
    """The first and last instruction of every value's life."""
    lines = re.finditer(r"^\s+(\S+?)\{([\d,]*)\}:(\d+)-(\d+)\s*$", text, re.MULTILINE)
    return {f"{m[1]}{{{m[2]}}}": (int(m[3]), int(m[4])) for m in lines}


def _highest(values: list[tuple[tuple[int, int], int, int, str, str]]) -> list[tuple[int, str, str]]:
    """The values that are live when most of the space is used, one for each place."""
    times = sorted({span[0] for span, _, size, _, _ in values if size > 2**20}) or [0]
    used = [0] * len(times)
    for (first, last), _, size, _, _ in values:
        for index in range(bisect.bisect_left(times, first), bisect.bisect_right(times, last)):
            used[index] += size
    candidates = sorted(range(len(times)), key=lambda index: -used[index])[:64]
    best: tuple[int, list] = (-1, [])
    for time in (times[index] for index in candidates):
        here = sorted((v for v in values if v[0][0] <= time <= v[0][1]), key=lambda v: (v[1], -v[2]))
        total, end, kept = 0, -math.inf, []
        for _, offset, size, what, name in here:
            if offset + size > end:
                if offset >= end:
                    kept.append((size, what, name))
                total += int(offset + size - max(offset, end))
                end = offset + size
        if total > best[0]:
            best = (total, kept)
    return best[1]


def _sources(text: str) -> dict[str, str]:
    """Maps instruction names to the line and operation that they come from."""
    found = {}
    for m in re.finditer(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*?metadata=\{([^}]*)\}", text, re.MULTILINE):
        line = re.search(r'source_file="([^"]*)"\s+source_line=(\d+)', m[2])
        made = re.search(r'op_name="([^"]*)"', m[2])
        source = f"{line[1].rpartition('/')[2]}:{line[2]}" if line else ""
        found[m[1]] = " ".join(part for part in (source, made[1][-100:] if made else "") if part)
    return found
