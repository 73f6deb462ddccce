"""How long a step takes, from what it computes and what it moves.

Each piece of work takes the longest of its products at the matrix units' rate, its elementwise operations at the
vector units' rate and its bytes at the memory's rate. Each collective takes its bytes over the rate of the links its
mesh axes run on. Collectives of activations stand in the way of the work that reads them. Collectives of weights
(gathers before use, reductions of gradients) are hidden under the computation of the same pass where the compiler
does that, as far as there is computation to hide under.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from trellis.hardware.chips import MEMORY_EFFICIENCY, Chip
from trellis.inspect.rows import Ledger, Row
from trellis.inspect.source import source_of

from .links import Links
from .trace import Step, inlined, is_literal, local_bytes
from .work import Op

PASSES = ("forward", "recomputed", "backward", "update")
# Elementwise work that the compiler fuses into the products around it, so that its bytes are not read again. Fitted
# on compiled programs.
FUSED_AWAY = 0.35
# Options that make a TPU compiler hide what it does not hide by itself.
HIDING_OPTIONS = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "gathers",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "gathers",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "reductions",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "reductions",
    "xla_enable_async_all_reduce": "reductions",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One row of the time table: alike work on one line of the program, in one pass.

    Attributes:
        kind: "product", "attention", "kernel", "elementwise", or a collective's kind.
        label: what a person would call it.
        where: forward, recomputed, backward or update.
        seconds: in a step, nothing hidden.
        hidden: seconds of these under computation.
        order: its place in the program; 0 for collectives.
        bound: what it waits for: "matrix units", "vector units", "memory", or the links of mesh axes.
        flops: FLOPs in a step, on one device.
        num_bytes: bytes in a step, on one device, through memory or over links.
        times: how often it runs.
        formula: how the seconds come about, with numbers.
        source: `file.py:line (function)`.
        axes: mesh axes of a collective.
    """

    kind: str
    label: str
    where: str
    seconds: float
    bound: str
    flops: float
    num_bytes: float
    times: int
    formula: str
    source: str
    axes: tuple[str, ...] = ()
    hidden: float = 0.0
    order: int = 0


@dataclasses.dataclass(frozen=True)
class Times:
    """The time of a step and its parts, on one device.

    Attributes:
        lines: longest first.
        seconds: the whole step.
        computation: seconds of products, attention and elementwise work.
        exposed: seconds of communication that nothing hides.
        hidden: seconds of communication under computation.
        flops: FLOPs of products and attention, recomputation included.
    """

    lines: tuple[Line, ...]
    seconds: float
    computation: float
    exposed: float
    hidden: float
    flops: float

    def by_bound(self) -> dict[str, float]:
        """Exposed seconds by what they wait for, longest first."""
        sums: collections.Counter[str] = collections.Counter()
        for line in self.lines:
            sums[line.bound] += line.seconds - line.hidden
        return dict(sums.most_common())

    @property
    def binding(self) -> str:
        """What most of the step waits for."""
        return next(iter(self.by_bound()), "nothing")


def padded(dims: tuple[int, int, int], tile: int) -> float:
    """How much larger a product is once its sizes are padded to the matrix units' tile.

    >>> padded((4096, 64, 4096), 128)
    2.0
    """
    ratio = 1.0
    for size in dims[1:]:
        if size:
            ratio *= -(-size // tile) * tile / size
    return ratio


def filled(inner: int, chip: Chip) -> float:
    """The share of a chip's rate for large products that one with a short contracted dimension reaches.

    Each tile of the result loads its first operands before it computes, and writes its result after: about as long as
    `chip.fill` more terms of the sum.

    >>> from trellis.hardware.chips import chips
    >>> filled(4096, chips()["h100"]) > 0.95, filled(512, chips()["h100"]) < 0.8
    (True, True)
    """
    return inner / (inner + chip.fill)


def waves(dims: tuple[int, int, int], count: float, chip: Chip) -> float:
    """How much longer a product takes on a GPU because its tiles come in whole waves over the processors.

    >>> from trellis.hardware.chips import chips
    >>> round(waves((128 * 109, 1024, 128), 1.0, chips()["a100"]), 2)  # 109 tiles on 108 processors
    1.98
    """
    tiles = count * math.ceil(dims[0] / 128) * math.ceil(dims[2] / 128)
    if chip.processors is None or tiles <= chip.processors:  # few tiles are cut along the contracted dimension
        return 1.0
    return math.ceil(tiles / chip.processors) * chip.processors / tiles


def work_line(op: Op, chip: Chip) -> Line:
    """The time of one piece of work."""
    bandwidth = chip.hbm_bandwidth * MEMORY_EFFICIENCY
    if chip.cache_bytes and op.num_bytes <= chip.cache_bytes:
        bandwidth = chip.cache_bandwidth
    memory = op.num_bytes / bandwidth
    vector = op.vector / chip.vector_flops
    matrix, rate = 0.0, 0.0
    if op.kind == "attention":
        rate = chip.bf16_flops * chip.attention_efficiency
        matrix = op.flops / rate
        vector = 0.0  # the kernel's efficiency has it
    elif op.flops:
        peak = chip.fp8_flops if "float8" in op.dtype else chip.bf16_flops
        slower = {"float32": 1 / chip.float32_share, "float64": 32}.get(op.dtype, 1)
        rate = peak * chip.matmul_efficiency / padded(op.dims, min(chip.tile, 128)) / slower
        if all(op.dims):
            rate *= filled(op.dims[1], chip) / waves(op.dims, op.flops / (2.0 * math.prod(op.dims)), chip)
        matrix = op.flops / rate
    if op.kind == "elementwise":
        memory *= 1 - FUSED_AWAY
    seconds, bound = max((matrix, "matrix units"), (vector, "vector units"), (memory, "memory"))
    seconds += chip.launch_seconds
    formula = {
        "matrix units": f"{op.flops:.3g} FLOP / {rate:.3g} FLOP/s",
        "vector units": f"{op.vector:.3g} operations / {chip.vector_flops:.3g} a second",
        "memory": f"{op.num_bytes:.3g} B / {bandwidth:.3g} B/s"
        + (f" x {1 - FUSED_AWAY:.2f} not fused away" if op.kind == "elementwise" else ""),
    }[bound]
    return Line(
        kind=op.kind,
        label=op.label or ("attention" if op.kind == "attention" else op.what),
        where=op.direction,
        seconds=seconds * op.times,
        bound=bound,
        flops=op.flops * op.times,
        num_bytes=op.num_bytes * op.times,
        times=op.times,
        formula=f"{op.times} x {formula}   {op.what}",
        source=op.source,
        order=op.order,
    )


def collective_line(row: Row, links: Links, role: str) -> Line:
    """The time of one collective of the ledger."""
    rate = links.bandwidth(row.axes)
    wire, note = row.wire, ""
    if row.kind == "reduce-scatter" and links.scatters_as_reduce(row.axes):
        wire, note = 2 * wire, ", as an all-reduce and a slice"
    return Line(
        kind=row.kind,
        label=f"{role} {row.what}",
        where=row.direction or "forward",
        seconds=links.seconds(wire, row.axes) * row.times,
        bound=f"links of {row.axis}",
        flops=0.0,
        num_bytes=float(wire) * row.times,
        times=row.times,
        formula=f"{row.times} x {wire:.3g} B / {rate:.3g} B/s over {row.axis}{note}",
        source=row.source,
        axes=row.axes,
    )


def roles(step: Step) -> dict[tuple[str, int], str]:
    """What each collective moves: "weights" (gathered before use), "gradients" (of weights) or "activations".

    Keyed by source line and payload bytes, as in the ledger's rows. A gather of what depends on parameters alone
    moves weights; a reduction whose result no layer reads moves gradients.
    """
    found: dict[tuple[str, int], str] = {}
    jaxpr = step.jaxpr.jaxpr
    weights = {var for var, kind in zip(jaxpr.invars, step.kinds) if kind == "parameters"}
    _roles(jaxpr, weights, [False] * len(jaxpr.outvars), found, "")
    return found


def _roles(jaxpr: Any, weights: set, wanted: list[bool], found: dict, outside: str) -> list[bool]:
    """Fills `found`; returns which outputs depend on parameters alone."""
    needed = {var for var, mark in zip(jaxpr.outvars, wanted) if mark and not is_literal(var)}
    inner_wanted: dict[int, list[bool]] = {}
    for eqn in reversed(jaxpr.eqns):
        inputs = [v for v in eqn.invars if not is_literal(v)]
        if eqn.primitive.name in ("scan", "while"):
            needed.update(inputs)
        elif any(var in needed for var in eqn.outvars):
            needed.update(inputs)
        inner_wanted[id(eqn)] = [var in needed for var in eqn.outvars]
    for eqn in jaxpr.eqns:
        inputs = [v for v in eqn.invars if not is_literal(v)]
        pure = bool(inputs) and all(v in weights for v in inputs)
        inner = inlined(eqn)
        stack = f"{outside}/{eqn.source_info.name_stack}"
        if eqn.primitive.name == "scan":
            inner = eqn.params["jaxpr"].jaxpr
            carry = eqn.params["num_carry"]
            marks = [i < carry for i in range(len(inner.outvars))]
        elif inner is not None:
            marks = inner_wanted[id(eqn)]
        if inner is not None:
            hot = {v for v, outer in zip(inner.invars, eqn.invars) if not is_literal(outer) and outer in weights}
            results = _roles(inner, hot, marks, found, stack)
            weights.update(var for var, mark in zip(eqn.outvars, results) if mark)
            continue
        if pure:
            weights.update(eqn.outvars)
        if not eqn.outvars or not hasattr(eqn.outvars[0].aval, "shape"):
            continue
        out = eqn.outvars[0]
        if pure:
            role = "weights"
        elif out not in needed and "transpose(" in stack:
            role = "gradients"
        else:
            role = "activations"
        sizes = {local_bytes(v.aval) for v in (*inputs, out) if hasattr(v.aval, "shape")}
        for size in sizes:
            key = (source_of(eqn), size)
            if found.get(key, role) != role and eqn.primitive.name not in ("reshard", "all_gather", "psum_scatter"):
                continue
            found[key] = role if found.get(key, role) == role or role == "activations" else found[key]
    return [not is_literal(v) and v in weights for v in jaxpr.outvars]


def times(
    ops: Sequence[Op], ledger: Ledger, links: Links, role_of: Mapping[tuple[str, int], str], hides: Sequence[str] = ()
) -> Times:
    """The time of a step.

    Args:
        ops: what one device computes.
        ledger: what moves.
        links: what it moves over.
        role_of: from `roles`.
        hides: what the compiler hides besides what it does as it comes: "gathers", "reductions".
    """
    chip = links.target.chip
    hides = {*chip.overlap, *hides}
    work = _merged([work_line(op, chip) for op in ops])
    room = collections.Counter()
    for line in work:
        room[line.where] += line.seconds
    room["backward"] += room.pop("recomputed", 0.0)
    moves = []
    for row in ledger.rows:
        role = role_of.get((row.source, row.payload), "activations")
        if role == "weights" and row.kind in ("reduce-scatter", "all-reduce"):
            role = "gradients"  # the transpose of a gather stands on the gather's line
        moves.append((role, collective_line(row, links, role)))
    lines = list(work)
    for role, line in sorted(moves, key=lambda pair: -pair[1].seconds):
        hidden = 0.0
        allowed = (role == "weights" and "gathers" in hides) or (role == "gradients" and "reductions" in hides)
        if allowed:
            where = "backward" if line.where == "recomputed" else line.where
            hidden = min(line.seconds, room[where])
            room[where] -= hidden
        lines.append(dataclasses.replace(line, hidden=hidden))
    computation = sum(line.seconds for line in work)
    moved = sum(line.seconds for _, line in moves)
    hidden = sum(line.hidden for line in lines)
    return Times(
        lines=tuple(sorted(lines, key=lambda line: -line.seconds)),
        seconds=computation + moved - hidden,
        computation=computation,
        exposed=moved - hidden,
        hidden=hidden,
        flops=sum(line.flops for line in work),
    )


def _merged(lines: list[Line]) -> list[Line]:
    """Lines of the same kind, label, pass, source and bound, added up."""
    groups: dict[tuple, list[Line]] = collections.defaultdict(list)
    for line in lines:
        groups[(line.kind, line.label, line.where, line.source, line.bound)].append(line)
    merged = []
    for group in groups.values():
        first = group[0]
        more = f"; and {len(group) - 1} more like it" if len(group) > 1 else ""
        merged.append(
            dataclasses.replace(
                first,
                seconds=sum(line.seconds for line in group),
                flops=sum(line.flops for line in group),
                num_bytes=sum(line.num_bytes for line in group),
                formula=first.formula + more,
            )
        )
    return merged
