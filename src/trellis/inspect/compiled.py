"""What a compiled program really does: its collectives, its products, its memory, its schedule.

Reads `compiled.as_text()` of CPU, GPU and TPU programs. The collectives come as the ledger's own rows, so that the
two can be compared.
"""

import collections
import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from jax.sharding import AbstractMesh, Mesh

from trellis._compat import full_text
from trellis.figures import numbers
from trellis.figures.text import aligned
from trellis.frames import in_a_library
from trellis.inspect.collective import Collective, collectives_in
from trellis.inspect.hlo import Instruction, Program, parse_program
from trellis.inspect.rows import Ledger, Row, wire_bytes
from trellis.inspect.ways import in_blocks
from trellis.program.pairs import axes_met, axes_of_pairs
from trellis.program.scopes import direction_of as pass_of
from trellis.program.scopes import names_of
from trellis.program.sizes import window_pairs

# XLA's names of element types that the notation names differently.
_DTYPES = {"pred": "bool", "s4": "i4", "s8": "i8", "s16": "i16", "s32": "i32", "s64": "i64"}


def program_of(compiled) -> Program:
    """The program of a `jax.stages.Compiled`, or of its text, read once."""
    if isinstance(compiled, Program):
        return compiled
    return _parsed(full_text(compiled))  # with its tables of devices


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> Program:
    return parse_program(text)


def _what(shape: tuple[int, ...], op_name: str | None) -> str:
    """An operand's sizes on one device, with names if the program's metadata kept them."""
    names = names_of(op_name or "", len(shape))
    return " ".join(f"{name}={size}" for name, size in zip(names, shape)) if names else " ".join(map(str, shape))


def direction_of(op_name: str | None) -> str:
    """The pass that an instruction belongs to, as the ledger calls it, by JAX's name for its origin."""
    return pass_of(op_name).replace("update", "forward") if op_name else ""


def collectives(compiled, mesh: Mesh | AbstractMesh, *, load: float | None = None) -> Ledger:
    """The collectives of a compiled program, as a ledger.

    Args:
        compiled: what `jax.jit(f).lower(...).compile()` returns, or its text.
        mesh: the mesh it was compiled for, whose device order numbers the program's partitions.
        load: rows that experts on the fullest device get, in those of an even load; None where nothing is assumed, and
            loops over them count once.

    Returns:
        Rows whose `what` is the operand's sizes on one device and whose `note` says `asynchronous` where it is.
    """
    rows = (row for _, row in collective_rows(compiled, mesh, load=load))
    return Ledger(tuple(rows), dict(mesh.shape))


def collective_rows(
    compiled, mesh: Mesh | AbstractMesh, *, load: float | None = None
) -> Iterator[tuple[Collective, Row]]:
    """The same, each as the program has it and as the ledger's row; those of groups of one device are left out."""
    program = program_of(compiled)
    for found in collectives_in(program, mesh.size, load):
        sent = axes_of_pairs(found.groups, mesh.shape, some=True) if found.kind == "permute" else ()
        axes = sent or axes_met(found.groups, mesh.shape)
        if not axes:
            continue
        payloads = tuple(found.payload(array) for array in found.arrays)
        payload = sum(payloads)
        yield (
            found,
            Row(
                kind=found.kind,
                axes=axes,
                what=" + ".join(_what(array.shape, found.op_name) for array in found.arrays),
                dtype=_DTYPES.get(found.arrays[0].dtype, found.arrays[0].dtype),
                payload=payload,
                wire=wire_bytes(found.kind, found.size, payload),
                times=found.times,
                direction=direction_of(found.op_name),
                source=program.source(found.origin, in_a_library),
                note="asynchronous" if found.asynchronous else "",
                reduction=found.reduction,
                payloads=payloads if len(payloads) > 1 else (),
            ),
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A ledger compared with a compiled program.

    Attributes:
        axes: for each mesh axis, bytes one device sends by the ledger and by the program (`Ledger.per_axis`).
        kinds: the same for each (axis, kind).
        rounded: by how many bytes both may differ for each axis, since each row is whole bytes, as are two thirds of
            one sum and of its two halves.
        stepped: how many bytes the program sends more for each axis because it takes a sum over several mesh axes over
            one after the other, the whole array each time; less than 0 where it takes such sums of the ledger as one.
    """

    axes: Mapping[str, tuple[int, int]]
    kinds: Mapping[tuple[str, str], tuple[int, int]]
    rounded: Mapping[str, int] = dataclasses.field(default_factory=dict)
    stepped: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def agrees(self, *, relative: float = 0.0, absolute: int = 0) -> bool:
        """Whether every mesh axis has the same bytes, within a fraction of the larger or a number of bytes, and but for
        sums over several mesh axes that are the same sums in steps (`stepped`)."""

        def near(axis: str, a: int, b: int) -> bool:
            a += self.stepped.get(axis, 0)
            return abs(a - b) <= max(relative * max(a, b), absolute, self.rounded.get(axis, 0))

        return all(near(axis, *both) for axis, both in self.axes.items())

    def __str__(self) -> str:
        def line(axis: str, kind: str, predicted: int, found: int) -> tuple[str, ...]:
            ratio = f"{found / predicted:.3f}" if found <= 1000 * predicted > 0 else "new" if found else "-"
            return axis, kind, numbers.size(predicted), numbers.size(found), ratio

        lines = []
        for axis, (predicted, found) in sorted(self.axes.items()):
            lines += [line(axis, k, *both) for (a, k), both in sorted(self.kinds.items()) if a == axis]
            lines.append(line(axis, "in all", predicted, found))
        return aligned(("axis", "collective", "ledger", "compiled", "ratio"), lines, right=(2, 3, 4))


def compare(ledger: Ledger, compiled: Ledger, *, scatter_as_reduce: bool = False) -> Comparison:
    """Bytes per mesh axis by the ledger and by the program.

    Args:
        ledger: from types.
        compiled: from `collectives`.
        scatter_as_reduce: count every reduce-scatter as an all-reduce and a slice, which is what the CPU's compiler
            makes of those in explicit mode, and the TPU's of small ones.
    """
    axes: dict[str, list[int]] = {}
    kinds: dict[tuple[str, str], list[int]] = {}
    rounded: collections.Counter[str] = collections.Counter()
    for side, table in enumerate((ledger, compiled)):
        table = dataclasses.replace(table, mesh=compiled.mesh)
        for row in table.rows:
            scattered = scatter_as_reduce and row.kind == "reduce-scatter"
            for axis, wire in table.split(row):
                total = wire * row.times * (2 if scattered else 1)
                axes.setdefault(axis, [0, 0])[side] += total
                size = 1 if row.kind == "permute" else math.prod(compiled.mesh[a] for a in axis.split(","))
                rounded[axis] += row.times if size & (size - 1) else 0  # a power of two divides what it slices
                kinds.setdefault((axis, "all-reduce" if scattered else row.kind), [0, 0])[side] += total
    both = lambda sums: {key: (ledger, program) for key, (ledger, program) in sums.items()}
    return Comparison(both(axes), both(kinds), dict(rounded), _stepped(ledger, compiled, scatter_as_reduce))


def _stepped(ledger: Ledger, compiled: Ledger, scatter_as_reduce: bool) -> dict[str, int]:
    """Bytes for each mesh axis that a program sends more than its ledger says because of sums in steps."""
    kinds = ("all-reduce", "reduce-scatter") if scatter_as_reduce else ("all-reduce",)
    over: Counter[tuple[str, frozenset[str], int]] = Counter()  # how many more sums over these axes the ledger has
    for sign, table in ((1, ledger), (-1, compiled)):
        for row in table.rows:
            for payload in (row.payloads or (row.payload,)) if row.kind in kinds else ():
                over[row.reduction, frozenset(row.axes), payload] += sign * row.times
    found: Counter[str] = Counter()

    def send(axes: frozenset[str], payload: int, runs: int) -> None:
        sent = wire_bytes("all-reduce", math.prod(compiled.mesh[axis] for axis in axes), payload)
        row = Row(kind="all-reduce", axes=tuple(axes), what="", dtype="", payload=payload, wire=sent)
        for axis, wire in compiled.split(row):
            found[axis] += wire * runs

    for how, axes, payload in sorted(filter(over.get, over), key=lambda key: -len(key[1])):
        for blocks in in_blocks(sorted(axes)):
            runs, steps = over[how, axes, payload], [(how, block, payload) for block in blocks]
            sign = 1 if runs > 0 else -1
            done = min(abs(runs), *(-sign * over[step] for step in steps))
            if len(blocks) == 1 or done <= 0:
                continue
            over[how, axes, payload] -= sign * done
            send(axes, payload, -sign * done)
            for step in steps:
                over[step] += sign * done
                send(step[1], payload, sign * done)
    return dict(found)


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of a compiled program.

    Attributes:
        what: the types of operands and result.
        flops: floating-point operations, a multiplication and an addition counting two, of one run on one device.
        num_bytes: bytes of operands and result.
        times: how often it runs.
        source: `file.py:line (function)`.
    """

    what: str
    flops: int
    num_bytes: int
    times: int
    source: str


def products(compiled) -> list[Product]:
    """The matrix products (dots, convolutions, GEMM calls) of a compiled program."""
    program = program_of(compiled)
    found = ((product_of(program, instruction), times) for instruction, times, _ in program.walk())
    return [dataclasses.replace(product, times=times) for product, times in found if product]


def product_of(program: Program, instruction: Instruction) -> Product | None:
    """The matrix product that an instruction is, run once; None for others."""
    contracted = _contracted(instruction)
    if instruction.op not in ("dot", "convolution") and contracted is None:
        return None
    operands = [program.by_name[name].results[0] for name in instruction.operands[:2] if name in program.by_name]
    if len(operands) < 2 or not instruction.results:
        return None
    left, right, result = *operands, instruction.results[0]
    if instruction.op == "convolution":
        flops = _convolution_flops(instruction, left.shape, right.shape, result.shape)
    else:
        flops = 2 * math.prod(result.shape) * math.prod(left.shape[i] for i in contracted or ())
    arrays = (left, right, result)
    what = " ".join(f"{a.dtype}{list(a.shape)}" for a in arrays)
    return Product(what, flops, sum(a.num_bytes for a in arrays), 1, program.source(instruction, in_a_library))


def _contracted(instruction: Instruction) -> list[int] | None:
    """The left operand's contracted dimensions, for a dot or a GEMM custom call."""
    if instruction.op == "dot":
        return [int(n) for n in re.findall(r"\d+", instruction.attribute("lhs_contracting_dims") or "")]
    if instruction.op == "custom-call" and re.search(r"gemm|matmul", instruction.quoted("custom_call_target") or ""):
        listed = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
        return [int(n) for n in re.findall(r"\d+", listed[1])] if listed else None
    return None


def _convolution_flops(instruction: Instruction, left, right, result) -> int:
    """As many multiplications as there are pairs of an output element and an input element under the window."""
    inputs, rest = (instruction.attribute("dim_labels") or "").split("_")
    kernel, outputs = rest.split("->")
    window = dict(re.findall(r"(\w+)=([\w\-x]+)", instruction.attribute("window") or ""))
    spatial = sorted(label for label in kernel if label.isdigit())

    def field(name: str, index: int, default: int) -> int:
        return int(window[name].split("x")[index]) if name in window else default

    pairs = 1
    for index, label in enumerate(spatial):
        pairs *= window_pairs(
            result[outputs.index(label)],
            right[kernel.index(label)],
            left[inputs.index(label)],
            stride=field("stride", index, 1),
            spread=field("rhs_dilate", index, 1),
            gaps=field("lhs_dilate", index, 1),
            before=int(window["pad"].split("x")[index].split("_")[0]) if "pad" in window else 0,
        )
    batch, features = result[outputs.index("b")], result[outputs.index("f")]
    return 2 * batch * features * right[kernel.index("i")] * pairs


def flops(compiled) -> int:
    """Floating-point operations of the matrix products, of one call on one device."""
    return sum(product.flops * product.times for product in products(compiled))


# Cycles of this size and more are no estimate: libtpu says near 2^63 for a kernel on some chips.
_NO_ESTIMATE = 2**48


def scheduled_cycles(compiled, *, load: float | None = None) -> int:
    """The TPU compiler's own estimate for everything but collectives and custom kernels, loops multiplied out.

    Divide by the chip's clock for seconds. Zero for programs that carry no estimates (CPU, GPU).

    Args:
        compiled: a program, or its text.
        load: as in `collectives`.
    """
    return sum(cycles_by_line(compiled, load=load).values())


def cycles_by_line(compiled, *, load: float | None = None) -> dict[str, int]:
    """The same for each line, `file.py:line (function)`, that it comes from; "" for what has none."""
    program, found = program_of(compiled), Counter[str]()
    for instruction, times, _ in program.walk(fusions=False, load=load):
        if cycles := cycles_of(instruction):
            found[program.source(instruction, in_a_library)] += cycles * times
    return dict(found)


def cycles_of(instruction: Instruction) -> int:
    """The TPU compiler's estimate of one run of an instruction; 0 if it has none."""
    cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    return int(cycles[1]) if cycles and int(cycles[1]) < _NO_ESTIMATE else 0


_ON_SPARSECORES = 'async_execution_thread="sparsecore"'


def gathered_bytes(compiled, *, load: float | None = None) -> dict[str, int]:
    """Bytes that gathers and scatters of rows read and write, by line, if a TPU's schedule has no estimate of them and
    its SparseCores do not make them beside it.

    Args:
        compiled: a program, or its text.
        load: as in `collectives`.
    """
    program, found = program_of(compiled), Counter[str]()
    beside = gathered_beside(program)
    for instruction, times, _ in program.walk(fusions=False, load=load):
        if instruction.name not in beside and (moved := gathered_by(instruction)):
            found[program.source(instruction, in_a_library)] += moved * times
    return dict(found)


def gathered_by(instruction: Instruction) -> int:
    """Bytes that one run of a gather or scatter of rows reads and writes, if it has no estimate; 0 for others."""
    what = (instruction.quoted("op_name") or "").rpartition("/")[2]
    if instruction.op not in ("fusion", "gather", "scatter") or not what.startswith(("gather", "scatter")):
        return 0
    return 0 if cycles_of(instruction) else 2 * sum(array.num_bytes for array in instruction.results)


def gathered_beside(program: Program) -> dict[str, int]:
    """The same of what a TPU's SparseCores gather and scatter while its matrix units compute, by the names of these
    instructions, which are inside of what an asynchronous call runs."""
    calls = [i for i in program.by_name.values() if i.op == "call-start" and _ON_SPARSECORES in i.attributes]
    called = {name for call in calls for names in call.called().values() for name in names}
    inside = [i for name in called for i in program.computations.get(name, ())]
    return {i.name: moved for i in inside if (moved := gathered_by(i))}


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledMemory:
    """Bytes one device needs to run a program, by the compiler's own count.

    Attributes:
        arguments: inputs.
        outputs: results.
        aliased: results that reuse an input's memory (donated).
        temporaries: everything made on the way.
        code: the program itself.
        host: all of these on the host, if the program offloads.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    host: int = 0

    @property
    def peak(self) -> int:
        """Bytes at the highest point: arguments, results that are not donated, temporaries and code."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    def __str__(self) -> str:
        lines = [
            (name, numbers.size(getattr(self, name))) for name in ("arguments", "outputs", "aliased", "temporaries")
        ]
        return aligned(
            ("kind", "bytes a device"),
            [*lines, ("code", numbers.size(self.code)), ("peak", numbers.size(self.peak))],
            right=(1,),
        )


def compiled_memory(compiled) -> CompiledMemory:
    """The compiler's memory analysis."""
    m = compiled.memory_analysis()
    return CompiledMemory(
        arguments=m.argument_size_in_bytes,
        outputs=m.output_size_in_bytes,
        aliased=m.alias_size_in_bytes,
        temporaries=m.temp_size_in_bytes,
        code=m.generated_code_size_in_bytes,
        host=m.host_argument_size_in_bytes + m.host_output_size_in_bytes + m.host_temp_size_in_bytes
        - m.host_alias_size_in_bytes,
    )  # fmt: skip
