"""The text of a compiled program (`compiled.as_text()`), read into computations, instructions and how often each runs.

Reads what XLA prints for CPU, GPU and TPU. It is a reader of one text format.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction

from trellis.inspect.counting import counted
from trellis.program.said import turns_in
from trellis.program.scopes import share_of_turns

_ITEM_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128, "bf16": 16}
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-~]+) \(.*\) -> .* \{")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-~]+) = ")
_CALLED = re.compile(r"(\w+)=(?:%([\w.\-~]+)|\{(%[^}]*)\})")
_CALLERS = ("calls", "to_apply", "body", "condition", "branch_computations", "true_computation", "false_computation",
            "called_computations")  # fmt: skip


def item_bits(dtype: str) -> int:
    """Bits of one element: of `bf16`, `f32`, `s4`, `f8e4m3fn`.

    >>> item_bits("f8e4m3fn"), item_bits("s4"), item_bits("pred")
    (8, 4, 8)
    """
    if dtype in _ITEM_BITS:
        return _ITEM_BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)
    if not digits:
        raise ValueError(f"'{dtype}' is not an element type of HLO")
    return int(digits[1])


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """An array's type in HLO."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes, without padding."""
        return math.prod(self.shape) * item_bits(self.dtype) // 8


def arrays_in(text: str) -> list[Array]:
    """The arrays of a type: one, or those of a tuple.

    >>> arrays_in("(f32[8,4]{1,0}, u32[])")
    [Array(dtype='f32', shape=(8, 4)), Array(dtype='u32', shape=())]
    """
    text = re.sub(r"\{[^{}]*\}", "", text)
    return [
        Array(dtype, tuple(int(size.lstrip("<=")) for size in shape.split(",") if size))
        for dtype, shape in _ARRAY.findall(text)
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of HLO.

    Attributes:
        name: without the percent sign.
        type: the result's type, as text.
        op: the operation, as in `all-gather-start`.
        operands: names.
        attributes: everything after the operands, as text.
        literal: what stands between the brackets, as text: a constant's value, a parameter's number.
        root: whether it is its computation's result.
    """

    name: str
    type: str
    op: str
    operands: tuple[str, ...]
    attributes: str
    literal: str = ""
    root: bool = False

    @property
    def results(self) -> list[Array]:
        """The arrays of the result's type."""
        return arrays_in(self.type)

    def attribute(self, name: str) -> str | None:
        """The value of an attribute, up to the comma that ends it."""
        found = re.search(rf"(?:^|[\s,]){name}=", self.attributes)
        return _balanced(self.attributes, found.end()) if found else None

    def groups(self) -> list[tuple[int, ...]]:
        """Its replica groups, or nothing if it has none."""
        found = re.search(r"replica_groups=(mesh\[[^{]*\{[^}]*\}|\[[\d,]*\]<=[^\s]*|\{)", self.attributes)
        if not found:
            return []
        return replica_groups(_balanced(self.attributes, found.start(1)) if found[1] == "{" else found[1].rstrip(","))

    def quoted(self, name: str) -> str | None:
        """A string somewhere in the attributes: `op_name="..."` or `"estimated_cycles":"..."`."""
        found = re.search(rf'{name}"?[=:]"((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else None

    def called(self) -> dict[str, list[str]]:
        """Computations it calls, by the attribute that names them."""
        found: dict[str, list[str]] = {}
        for key, single, several in _CALLED.findall(self.attributes.partition("metadata={")[0]):
            if key in _CALLERS:
                found[key] = [single] if single else [name.strip().lstrip("%") for name in several.split(",")]
        return found


def _balanced(text: str, start: int) -> str:
    """From `start` to the comma at depth zero."""
    depth, quoted = 0, False
    for index in range(start, len(text)):
        char = text[index]
        if char == '"' and text[index - 1] != "\\":
            quoted = not quoted
        if quoted:
            continue
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            return text[start:index].strip()
        if depth < 0:
            return text[start:index].strip()
    return text[start:].strip()


def _closing(text: str, start: int) -> int:
    """The index of the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] in "([{":
            depth += 1
        elif text[index] in ")]}":
            depth -= 1
            if depth == 0:
                return index
    raise ValueError(f"unbalanced brackets in HLO: {text[start : start + 80]}")


def _instruction(line: str) -> Instruction:
    head = _INSTRUCTION.match(line)
    assert head is not None, line
    rest = line[head.end() :]
    if rest.startswith("("):  # a tuple's type
        end = _closing(rest, 0) + 1
    else:  # a single array's type has no spaces
        end = rest.index(" ")
    type_, rest = rest[:end], rest[end:].lstrip()
    open_ = rest.index("(")
    close = _closing(rest, open_)
    inside = rest[open_ + 1 : close]
    operands = tuple(re.findall(r"%([\w.\-~#]+)", inside))
    return Instruction(head[2], type_, rest[:open_], operands, rest[close + 1 :].lstrip(", "), inside, bool(head[1]))


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        computations: instructions by computation.
        entry: the computation that runs.
        frames: `stack_frame_id` to (file, line, function, parent's id), if the text has such a table.
        aliases: for results, the arguments whose memory they take over.
    """

    computations: dict[str, list[Instruction]]
    entry: str
    frames: dict[int, tuple[str, int, str, int]]
    aliases: dict[int, int]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Every instruction by its name (unique in a program)."""
        return {i.name: i for instructions in self.computations.values() for i in instructions}

    @functools.cached_property
    def callers(self) -> dict[str, Instruction]:
        """The instruction that calls each computation; the first if there are several."""
        found: dict[str, Instruction] = {}
        for instruction in self.by_name.values():
            for name in itertools.chain.from_iterable(instruction.called().values()):
                found.setdefault(name, instruction)
        return found

    @functools.cached_property
    def homes(self) -> dict[str, str]:
        """The computation that each instruction stands in, by its name."""
        return {i.name: name for name, instructions in self.computations.items() for i in instructions}

    def root(self, computation: str) -> Instruction | None:
        """The instruction whose result is that of a computation; None if there is no such computation."""
        return next((i for i in self.computations.get(computation, ()) if i.root), None)

    def scopes(self, instruction: Instruction) -> str:
        """The scopes around an instruction: its `op_name`, after those of the calls that lead to it.

        A compiler inlines calls, and gives each instruction the whole path. Before that, each has its own part of it.
        """
        found: list[str] = []
        caller: Instruction | None = instruction
        while caller is not None:
            found.append(caller.quoted("op_name") or "")
            caller = self.callers.get(self.homes.get(caller.name, ""))
        return "/".join(reversed(found))

    def combined_by(self, reduction: Instruction) -> str:
        """The operation with which a reduction combines two elements, as `add`; empty if it is not one operation."""
        combine = self.computations.get(reduction.called().get("to_apply", [""])[0], ())
        made = [i.op for i in combine if i.op not in ("parameter", "convert", "bitcast", "copy")]
        return made[0] if len(made) == 1 else ""

    def trip_count(self, loop: Instruction, load: float | None = None) -> int | None:
        """How often a `while` runs, from `known_trip_count` or from how it counts (`counting.py`); None if unknown.

        Args:
            loop: the instruction.
            load: rows that experts on the fullest device get, in those of an even load: then loops over them run as
                often as `trellis.program.said.loop_turns` said. None where nothing is assumed.
        """
        known = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.attributes)
        if known:
            return int(known[1])
        turns = counted(self, loop)
        if turns is not None:
            return turns
        return None if load is None else turns_in(loop.quoted("op_name") or "", load)

    def walk(self, *, fusions: bool = True, load: float | None = None) -> Iterator[tuple[Instruction, int, str]]:
        """Every instruction with how often it runs and the computation it stands in.

        Loop bodies are multiplied out (a loop whose count is not known counts once). Each of a conditional's branches
        counts as often as its scope says that the costly one runs (`trellis.program.scopes.sometimes`), or every time.
        Computations that only say how to combine two elements (`to_apply` of a reduction) are not entered, nor are
        those of fusions if `fusions` is false.

        Args:
            fusions: whether to enter fusions.
            load: as in `trip_count`; loops that do not run at this load are passed over.
        """
        yield from self._walk(self.entry, 1, fusions, load)

    def _walk(self, name: str, times: int, fusions: bool, load: float | None) -> Iterator[tuple[Instruction, int, str]]:
        for instruction in self.computations.get(name, ()):
            yield instruction, times, name
            if instruction.op.endswith(("-done", "-update")):
                continue  # the start of the same pair has been entered
            if instruction.op == "fusion" and not fusions:
                continue
            for called, runs in self.calls(instruction, load):
                if inner := int(times * runs):
                    yield from self._walk(called, inner, fusions, load)

    def calls(self, instruction: Instruction, load: float | None = None) -> list[tuple[str, Fraction]]:
        """The computations that an instruction runs, each with how often, as `walk` counts them."""
        runs = Fraction(1)
        if instruction.op == "while":
            turns = self.trip_count(instruction, load)
            runs = Fraction(1 if turns is None else turns)
        elif instruction.op == "conditional":
            runs = Fraction(*share_of_turns(instruction.quoted("op_name") or ""))
        combines = () if instruction.op in ("call", "call-start") else ("to_apply",)
        return [(name, runs) for key, names in instruction.called().items() if key not in combines for name in names]

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instructions of the computations that an instruction calls, and of those that these call."""
        for names in instruction.called().values():
            for name in names:
                for inner in self.computations.get(name, ()):
                    yield inner
                    yield from self.inside(inner)

    def source(self, instruction: Instruction, skip: Callable[[str], bool] = lambda file: False) -> str:
        """`file.py:line (function)` from the metadata, or nothing.

        Args:
            instruction: any.
            skip: files whose frames are passed over, innermost first.
        """
        file, line, function = "", 0, ""
        found = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        frame = int(found[1]) if found else 0
        while frame in self.frames and (not file or skip(file)):
            file, line, function, parent = self.frames[frame]
            frame = parent
        if file:
            function = function.rpartition(".")[2]
        elif name := instruction.quoted("source_file"):
            number = re.search(r"source_line=(\d+)", instruction.attributes)
            file, line = name, int(number[1]) if number else 0
        if not file:
            return ""
        return f"{file.rpartition('/')[2]}:{line}" + (f" ({function})" if function else "")


def parse_program(text: str) -> Program:
    """Reads a program.

    Raises:
        ValueError: the text has no ENTRY computation.
    """
    lines: dict[str, list[str]] = {}
    entry = current = None
    for line in text.splitlines():
        if current is not None and _INSTRUCTION.match(line):
            lines[current].append(line)
        # A Pallas kernel's attributes span several lines, some of which start with a brace, too; a computation for a
        # TPU's SparseCore says so after its brace.
        elif line.rstrip() == "}" or line.startswith("}, execution_thread="):
            current = None
        elif current is not None and lines[current]:
            lines[current][-1] += line
        elif found := _COMPUTATION.match(line):
            current = found[2]
            lines[current] = []
            entry = current if found[1] else entry
    if entry is None:
        raise ValueError(
            "a compiled program's text must have an ENTRY computation, and this text has none: pass as_text()"
        )
    computations = {name: _with_elements([_instruction(line) for line in inside]) for name, inside in lines.items()}
    return Program(computations, entry, _frames(text), _aliases(text))


def _with_elements(instructions: list[Instruction]) -> list[Instruction]:
    """Elements of tuples that stand as operands, `%pair#1`, written out as `get-tuple-element`.

    JAX 0.12 prints both.
    """
    if not any("#" in name for i in instructions for name in i.operands):
        return instructions
    found: dict[str, Instruction] = {}
    for instruction in instructions:
        for name in instruction.operands:
            whole, *path = name.split("#")
            for index in path:
                element = f"{whole}#{index}"
                if element not in found:
                    type_ = tuple_parts(found[whole].type)[int(index)]
                    found[element] = Instruction(element, type_, "get-tuple-element", (whole,), f"index={index}")
                whole = element
        found[instruction.name] = instruction
    return list(found.values())


def tuple_parts(text: str) -> list[str]:
    """The types in a tuple's type, as text; none for a type that is no tuple.

    >>> tuple_parts("((f32[2]{0}, u32[]), bf16[4,2]{1,0})")
    ['(f32[2]{0}, u32[])', 'bf16[4,2]{1,0}']
    """
    if not text.startswith("("):
        return []
    text = re.sub(r"/\*.*?\*/", "", text[1:-1])
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()] if text[start:].strip() else parts


def _aliases(text: str) -> dict[int, int]:
    """The arguments that results replace, by the head of a program's text.

    >>> _aliases("HloModule f, input_output_alias={ {0}: (0, {}, may-alias), {2}: (1, {}, must-alias) }, layout={}")
    {0: 0, 2: 1}
    """
    listed = re.search(r"input_output_alias=\{(.*?)\}(?:, \w+=|$)", text.partition("\n")[0])
    pairs = re.findall(r"\{(\d+)\}: \((\d+), \{\}", listed[1]) if listed else []
    return {int(result): int(argument) for result, argument in pairs}


def _frames(text: str) -> dict[int, tuple[str, int, str, int]]:
    """XLA's tables of files, functions, locations and frames at the head of the text."""

    def section(title: str) -> dict[int, str]:
        found = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.M)
        lines = found[1].splitlines() if found else []
        return {int(number): rest for number, _, rest in (line.partition(" ") for line in lines)}

    files = {key: value.strip('"') for key, value in section("FileNames").items()}
    functions = {key: value.strip('"') for key, value in section("FunctionNames").items()}
    locations = {}
    for key, value in section("FileLocations").items():
        fields = dict(pair.split("=") for pair in value.strip("{}").split())
        locations[key] = (
            files.get(int(fields.get("file_name_id", 0)), ""),
            int(fields.get("line", 0)),
            functions.get(int(fields.get("function_name_id", 0)), ""),
        )
    frames: dict[int, tuple[str, int, str, int]] = {}
    for key, value in section("StackFrames").items():
        found = re.search(r"file_location_id=(\d+)", value)
        parent = re.search(r"parent_frame_id=(\d+)", value)
        if found and int(found[1]) in locations:
            frames[key] = (*locations[int(found[1])], int(parent[1]) if parent else 0)
    if frames.get(1, (0, 0, 0, 0))[3] == 1:  # the first frame has no parent: this XLA's parent numbers are one higher
        frames = {key: (*frame[:3], frame[3] - 1) for key, frame in frames.items()}
    return frames


def replica_groups(text: str) -> list[tuple[int, ...]]:
    """Device groups in any of the ways XLA writes them.

    >>> replica_groups("{{0,1},{2,3}}")
    [(0, 1), (2, 3)]
    >>> replica_groups("[2,4]<=[4,2]T(1,0)")
    [(0, 2, 4, 6), (1, 3, 5, 7)]
    >>> replica_groups("mesh['a'=4,'b'=2] {'a'}")
    [(0, 2, 4, 6), (1, 3, 5, 7)]
    >>> replica_groups("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}")
    [(0, 2, 4, 6), (1, 3, 5, 7)]
    >>> replica_groups("mesh['a'=2,'b'=2,'c'=2] {'b','a'}")
    [(0, 4, 2, 6), (1, 5, 3, 7)]
    """
    text = text.strip()
    if text.startswith("mesh["):
        return _mesh_groups(text)
    if text.startswith("["):
        found = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
        if not found:
            raise ValueError(f"replica groups in an unknown form: {text[:120]}")
        groups, size = _numbers(found[1])[0], math.prod(_numbers(found[1])[1:])
        order = _transposed(_numbers(found[2]), _numbers(found[3]) if found[3] else None)
        return [tuple(order[i * size : (i + 1) * size]) for i in range(groups)]
    return [tuple(_numbers(group)) for group in re.findall(r"\{([\d,\s]+)\}", text)]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]


def _transposed(sizes: list[int], permutation: list[int] | None) -> list[int]:
    """The numbers 0, 1, ... laid out in `sizes`, read in the order of the permuted dimensions."""
    permutation = permutation or list(range(len(sizes)))
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    ranges = [range(sizes[i]) for i in permutation]
    return [sum(x * strides[i] for x, i in zip(index, permutation)) for index in itertools.product(*ranges)]


def _mesh_groups(text: str) -> list[tuple[int, ...]]:
    """`mesh['a'=4,'b'=2], device_ids=(...) {'a', 'b':(1)2}`: the devices that differ in the named axes only.

    In a group the first of the named axes is the major one, wherever the mesh has it.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", text.partition("]")[0])}
    devices = list(range(math.prod(sizes.values())))
    if ids := re.search(r"device_ids=\(?(\[[\d,]*\](?:T\([\d,]*\))?|[\d,\s]+)", text):
        iota = re.match(r"\[([\d,]*)\](?:T\(([\d,]*)\))?", ids[1])
        devices = _transposed(_numbers(iota[1]), _numbers(iota[2] or "") or None) if iota else _numbers(ids[1])
    used = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", text.rpartition("{")[2])
    layout: list[int] = []  # the sizes of all mesh axes, parts of axes apart
    places: dict[int, int] = {}  # the named axes by their places in `used`, and where they are in the layout
    for name, size in sizes.items():
        done = 1
        mine = sorted((int(before or 1), int(part or size), i) for i, (n, before, part) in enumerate(used) if n == name)
        for before, part, place in mine:
            layout += [before // done, part]
            places[place], done = len(layout) - 1, before * part
        layout.append(size // done)
    inside = [places[i] for i in sorted(places)]
    outside = [i for i in range(len(layout)) if i not in inside]
    size = math.prod(layout[i] for i in inside)
    order = _transposed(layout, outside + inside)
    return [tuple(devices[d] for d in order[i : i + size]) for i in range(0, len(order), size)]


def source_target_pairs(text: str) -> list[tuple[int, int]]:
    """The pairs of a collective-permute.

    >>> source_target_pairs("{{0,1},{1,0}}")
    [(0, 1), (1, 0)]
    """
    return [(int(a), int(b)) for a, b in re.findall(r"\{\s*(\d+)\s*,\s*(\d+)\s*\}", text)]
