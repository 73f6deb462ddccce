"""How long a step takes, from what it computes and what it moves.

Each piece of work takes the longest of its products at the matrix units' rate, its elementwise operations at the vector
units' rate and its bytes at the memory's rate. Each collective takes its bytes over the rate of the links its mesh axes
run on. Collectives of activations delay the work that reads them. Collectives of weights (gathers before use,
reductions of gradients) are hidden under the computation of the same pass if the compiler does that, as far as there is
computation to hide under; on TPUs, in a loop, under that of one turn (`trellis.plan.turns`), and of layers that are
written out, the smaller a share, the more there is to hide. So are, on GPUs, exchanges of batches in several parts
(`Routing.interleave`), except one part's. The steps of a ring run beside the kernels or products of the same line of
the program, in the same pass. Copies to and from the host's memory are hidden under the computation of their pass.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from trellis.hardware.chips import Chip
from trellis.inspect.rows import Ledger, Row
from trellis.inspect.work import HOST_COPY, Piece
from trellis.plan.links import Links
from trellis.plan.turns import Sent, Turns, waits

# The numbers side by side in a TPU's vector registers, and the sides of the smallest matrix units' tiles.
LANES = 128
# The share of elementwise work that the compiler fuses into the products around it, so that its bytes are not read
# again. Fitted to compiled programs.
FUSED_AWAY = 0.35
# Of the time that products of heads would take longer, if libtpu padded each head to 128 lanes, the share that they do:
# with heads of 64 they took 1.3 (1B on v5e), 1.5 (GPT-OSS on v6e) and 1.8 times as long (on v5p) as merged ones.
PADDED_HEADS = 0.6
# Of layers written out: the part of the forward pass's computation that its gathers may take on a TPU before some of
# those for the backward pass are made earlier. Compiled steps held next to none where they took 0.7 of it (Qwen3 on
# v6e), and those of a quarter of all layers where they took 0.94 (GPT-OSS there).
HIDES_ALL = 2 / 3
# Options that make a TPU compiler hide what it does not hide by default. Gathers that SparseCores make over several
# sides of the torus need an option of their own beside the first.
HIDING_OPTIONS = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "gathers over 1",
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "gathers over 2",
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": "gathers over 3",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "gathers",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "reductions",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "reductions",
    "xla_enable_async_all_reduce": "reductions",
}

K = TypeVar("K", bound=Hashable)


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One row of the time table: similar work on one line of the program, in one pass.

    Attributes:
        kind: the kind of a piece of work, or of a collective.
        label: what a person would call it.
        where: forward, recomputed, backward or update.
        seconds: the seconds in a step, if nothing were hidden.
        hidden: seconds of these under computation.
        order: its place in the program; 0 for collectives.
        rate: FLOP/s that the matrix units reach on it, if they bound it.
        bound: what it waits for: "matrix units", "vector units", "memory", "the host's memory", or the links of mesh
            axes.
        flops: FLOPs in a step, on one device.
        num_bytes: bytes in a step, on one device, through memory or over links.
        times: how often it runs, or, if it is several of a kind, what runs most often; in a loop that is written out as
            often as there are turns.
        turns: in how many of these it is one turn's of a loop that is written out.
        formula: how the seconds are calculated, with numbers.
        source: `file.py:line (function)`.
        axes: mesh axes of a collective.
        role: what a collective moves: "weights", "gradients" or "activations".
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
    role: str = ""
    hidden: float = 0.0
    order: int = 0
    turns: int = 1
    rate: float = 0.0

    @property
    def moves(self) -> bool:
        """Whether it only moves something, between devices or to and from the host, and computes nothing."""
        return bool(self.axes) or self.kind == HOST_COPY


@dataclasses.dataclass(frozen=True)
class Times:
    """The time of a step and its parts, on one device.

    Attributes:
        lines: the rows, longest first.
        seconds: the whole step.
        computation: seconds of products, attention and elementwise work.
        exposed: seconds of communication, and of copies to and from the host, that nothing hides.
        hidden: seconds of these under computation.
        flops: FLOPs of products and attention, recomputation included.
        ahead: of layers that are written out, the share whose weights a TPU's compiler gathers for the backward pass
            before they are needed, because there is more to move than the forward pass hides.
    """

    lines: tuple[Line, ...]
    seconds: float
    computation: float
    exposed: float
    hidden: float
    flops: float
    ahead: float = 0.0

    def by_bound(self) -> dict[str, float]:
        """Exposed seconds by what they wait for, longest first."""
        return _exposed((line.bound, line) for line in self.lines)

    def by_axes(self) -> dict[tuple[str, ...], float]:
        """Exposed seconds of communication by the mesh axes that it is over, longest first."""
        return _exposed((line.axes, line) for line in self.lines if line.axes)

    @property
    def copies(self) -> tuple[Line, ...]:
        """The lines of copies to and from the host's memory."""
        return tuple(line for line in self.lines if line.kind == HOST_COPY)

    @property
    def binding(self) -> str:
        """What most of the step waits for."""
        return next(iter(self.by_bound()), "nothing")


def _exposed(lines: Iterable[tuple[K, Line]]) -> dict[K, float]:
    """The seconds of lines that nothing hides, added up by key, longest first."""
    sums: dict[K, float] = collections.defaultdict(float)
    for key, line in lines:
        sums[key] += line.seconds - line.hidden
    return dict(sorted(sums.items(), key=lambda each: -each[1]))


def padded(dims: tuple[int, int, int], tile: int) -> float:
    """How much larger a product is once its sizes are padded to the matrix units' tile.

    >>> padded((4096, 64, 4096), 128)
    2.0
    """
    return _in_whole_tiles((size for size in dims[1:] if size), tile)


def _in_whole_tiles(sizes: Iterable[int], tile: int) -> float:
    """How much larger something of these sizes is in whole tiles."""
    return math.prod(-(-size // tile) * tile / size for size in sizes)


def padded_heads(last: tuple[int, int, int]) -> float:
    """How much longer a TPU's product takes whose dimensions end in ones narrower than 128 lanes, as heads of 64 are.

    Args:
        last: as in `Piece.last`.

    >>> padded_heads((4096, 0, 64)), padded_heads((4096, 0, 128))
    (1.6, 1.0)
    """
    ratio = _in_whole_tiles((size for size in last if LANES // 2 <= size < LANES), LANES)
    return 1.0 + PADDED_HEADS * (ratio - 1.0)


def filled(inner: int, chip: Chip) -> float:
    """The share of a chip's rate for large products that one with a short contracted dimension reaches.

    Each tile of the result loads its first operands before it computes, and writes its result afterwards: that takes
    about as long as `chip.fill` more terms of the sum.

    >>> from trellis.hardware.chips import chips
    >>> filled(4096, chips()["h100"]) > 0.9, filled(512, chips()["h100"]) < 0.8
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
    if chip.processors is None or tiles <= chip.processors:  # if few, they are cut along the contracted dimension
        return 1.0
    return math.ceil(tiles / chip.processors) * chip.processors / tiles


def multiplies_only(dims: tuple[int, int, int]) -> bool:
    """Whether a product is not one for the matrix units: it has no sum, or gives one number for each of its batch.

    XLA turns these into multiplications and sums.

    >>> multiplies_only((65536, 1, 1)), multiplies_only((1, 65536, 1)), multiplies_only((64, 64, 1))
    (True, True, False)
    """
    rows, inner, columns = dims
    return inner == 1 or rows == columns == 1


def work_line(piece: Piece, chip: Chip) -> Line:
    """The time of one piece of work."""
    bandwidth = chip.host_bandwidth if piece.kind == HOST_COPY else chip.streaming_bandwidth
    if piece.kind != HOST_COPY and chip.cache_bytes and piece.num_bytes <= chip.cache_bytes:
        bandwidth = chip.cache_bandwidth
    memory = piece.num_bytes / bandwidth * piece.slower
    vector = piece.vector / chip.vector_flops
    matrix, rate = 0.0, 0.0
    if piece.kind == "attention":
        rate = chip.attention_rate(piece.dims[1], piece.whole)
        matrix = piece.flops / rate
        vector = 0.0  # the kernel's efficiency includes it
    elif piece.flops and multiplies_only(piece.dims):
        vector += piece.flops / chip.vector_flops
    elif piece.flops:
        narrow = {"float4": chip.fp4_flops, "float8": chip.fp8_flops, "int8": chip.int8_flops}
        peak = narrow.get(piece.dtype.partition("_")[0], chip.bf16_flops)
        slower = {"float32": 1 / chip.float32_share, "float64": 32}.get(piece.dtype, 1)
        rate = peak * chip.matmul_efficiency / padded(piece.dims, min(chip.tile, LANES)) / slower
        if chip.kind == "tpu":
            rate /= padded_heads(piece.last)
        if all(piece.dims):
            rate *= filled(piece.dims[1], chip) / waves(piece.dims, piece.flops / (2.0 * math.prod(piece.dims)), chip)
        if piece.kind == "grouped":
            rate *= chip.grouped_efficiency
        matrix = piece.flops / rate
    fuses = piece.kind == "elementwise" and not piece.alone
    if fuses:
        memory *= 1 - FUSED_AWAY
    reads = "the host's memory" if piece.kind == HOST_COPY else "memory"
    seconds, bound = max((matrix, "matrix units"), (vector, "vector units"), (memory, reads))
    seconds += chip.launch_seconds
    formula = {
        "matrix units": f"{piece.flops:.3g} FLOP / {rate:.3g} FLOP/s",
        "vector units": f"{piece.vector:.3g} operations / {chip.vector_flops:.3g} a second",
        reads: f"{piece.num_bytes:.3g} B / {bandwidth:.3g} B/s"
        + (f" x {1 - FUSED_AWAY:.2f} not fused away" if fuses else "")
        + (f" x {piece.slower:.3g} {piece.alone}" if piece.slower != 1 else ""),
    }[bound]
    return Line(
        kind=piece.kind,
        label=piece.label or ("attention" if piece.kind == "attention" else piece.what),
        where=piece.direction,
        seconds=seconds * piece.times,
        bound=bound,
        flops=piece.flops * piece.times,
        num_bytes=piece.num_bytes * piece.times,
        times=piece.times * piece.turns,
        turns=piece.turns,
        formula=f"{piece.times} x {formula}   {piece.what}",
        source=piece.source,
        order=piece.number,
        rate=rate if bound == "matrix units" else 0.0,
    )


def collective_line(row: Row, links: Links) -> Line:
    """The time of one collective of the ledger."""
    rate = links.bandwidth(row.axes, row.kind)
    wire, note = row.wire, ""
    if row.kind == "reduce-scatter" and links.scatters_as_reduce(row.axes):
        wire, note = 2 * wire, ", as an all-reduce and a slice"
    return Line(
        kind=row.kind,
        label=f"{row.role or 'activations'} {row.what}",
        where=row.direction or "forward",
        seconds=links.seconds(wire, row.axes, row.kind) * row.times,
        bound=f"links of {row.axis}",
        flops=0.0,
        num_bytes=float(wire) * row.times,
        times=row.times * row.turns,
        turns=row.turns,
        formula=f"{row.times} x {wire:.3g} B / {rate:.3g} B/s over {row.axis}{note}",
        source=row.source,
        axes=row.axes,
        role=row.role or "activations",
    )


def times(
    work: Sequence[Piece],
    ledger: Ledger,
    links: Links,
    hides: Sequence[str] = (),
    loops: Sequence[Turns] = (),
) -> Times:
    """The time of a step.

    Args:
        work: what one device computes.
        ledger: what moves.
        links: what it moves over.
        hides: what the compiler hides besides what it hides by default: "gathers", "reductions", or, of gathers, those
            over one side of a torus, "gathers over 1", and those over two or three besides.
        loops: the program's loops, those within others first, if what moves in a turn is hidden under that turn alone.
    """
    chip = links.target.chip
    covered = functools.partial(_covered, covers={*chip.overlap, *hides}, links=links)
    each_line = [work_line(piece, chip) for piece in work]
    work_lines = _merged(each_line)
    computed = [line for line in work_lines if not line.moves]
    copies = [line for line in work_lines if line.moves]
    room: dict[str, float] = collections.defaultdict(float)
    beside: dict[tuple[str, str], float] = collections.defaultdict(float)  # by line of the program
    for line in computed:
        room[_pass(line)] += line.seconds
        if line.kind != "elementwise":
            beside[line.where, line.source] += line.seconds
    free = room.copy()  # for copies to and from the host, which run at the same time as what moves between devices
    moves = collective_lines(ledger, links)
    busy = _busy(moves, covered, room) if chip.kind == "tpu" else {}
    in_turns = _hidden_in_turns(each_line, moves, covered, loops)
    moved = []
    for row, line in sorted(moves, key=lambda pair: (not pair[0].ring, -pair[1].seconds)):
        where = _pass(line)
        hidden = 0.0
        if row.ring and chip.kind != "cpu":
            hidden = min(line.seconds, beside[line.where, line.source], room[where])
            beside[line.where, line.source] -= hidden
        elif id(row) in in_turns:
            hidden = min(in_turns[id(row)], room[where])
        elif covered(row):
            beside_layers = 1 - busy.get(where, 0.0) / 2 if row.turns > 1 else 1.0
            hidden = min(line.seconds * beside_layers, room[where])
        elif row.parts > 1 and chip.kind == "gpu":  # one part's exchange has nothing left beside it
            hidden = min(line.seconds * (1 - 1 / row.parts), room[where])
        room[where] -= hidden
        moved.append(dataclasses.replace(line, hidden=hidden))
    for line in copies:
        hidden = min(line.seconds, free[_pass(line)])
        free[_pass(line)] -= hidden
        moved.append(dataclasses.replace(line, hidden=hidden))
    computation = sum(line.seconds for line in computed)
    hidden = sum(line.hidden for line in moved)
    exposed = sum(line.seconds for line in moved) - hidden
    return Times(
        lines=tuple(sorted((*computed, *_merged(moved)), key=lambda line: -line.seconds)),
        seconds=computation + exposed,
        computation=computation,
        exposed=exposed,
        hidden=hidden,
        flops=sum(line.flops for line in computed),
        ahead=max(busy.get("forward", 0.0) - HIDES_ALL, 0.0),
    )


def _covered(row: Row, covers: Collection[str], links: Links) -> bool:
    """Whether the compiler runs what moves beside computation."""
    if row.role == "weights":
        return "gathers" in covers or {"gathers over 1", f"gathers over {links.sides(row.axes) or 1}"} <= {*covers}
    reduced = row.role == "gradients" and not (row.awaited or links.scatters_alone(row))
    return reduced and "reductions" in covers


def _busy(
    moves: Sequence[tuple[Row, Line]], covered: Callable[[Row], bool], room: Mapping[str, float]
) -> dict[str, float]:
    """For each pass, the share of its computation that weights and gradients of layers written out would take.

    libtpu 0.0.42 moves these beside computation, but the more there is of them, the more of it stands where there is
    nothing left to compute: of what takes as long as the computation around it, half. In compiled steps 0 to 17 % were
    waited for where they took up to a third of the computation, and 26 to 54 % where they took two thirds or more.
    """
    seconds: dict[str, float] = collections.defaultdict(float)
    for row, line in moves:
        if row.turns > 1 and covered(row):
            seconds[_pass(line)] += line.seconds
    return {where: min(moved / room[where], 1.0) for where, moved in seconds.items() if room.get(where)}


def _hidden_in_turns(
    computed: Sequence[Line],
    moves: Sequence[tuple[Row, Line]],
    covered: Callable[[Row], bool],
    loops: Sequence[Turns],
) -> dict[int, float]:
    """Seconds of a step for which what moves in loops is hidden under their turns, by `id` of the row."""
    homes = [next((turns for turns in loops if row.number in turns), None) for row, _ in moves]
    hidden: dict[int, float] = {}
    for turns in loops:
        here = [(row, line.seconds / turns.times) for (row, line), home in zip(moves, homes) if home is turns]
        beside = [(row, seconds) for row, seconds in here if covered(row)]
        if not beside:
            continue
        busy = [(line.order, line.seconds / turns.times) for line in computed if line.order in turns and not line.moves]
        busy += [(row.number, seconds) for row, seconds in here if not (row.ring or covered(row))]
        sent = [Sent(id(row), seconds, row.made, row.read, row.role == "weights") for row, seconds in beside]
        waited = waits(busy, sent)
        hidden |= {each.key: max(each.seconds - waited[each.key], 0.0) * turns.times for each in sent}
    return hidden


def _pass(line: Line) -> str:
    """The pass of a line: backward also for what is computed again there."""
    return "backward" if line.where == "recomputed" else line.where


def collective_lines(ledger: Ledger, links: Links) -> list[tuple[Row, Line]]:
    """The times of a ledger's collectives, if nothing were hidden. Steps of a ring that travel up and down run at once:
    together they take as long as the longer.
    """
    moves = [(row, collective_line(row, links)) for row in ledger.rows]
    ways: dict[tuple, dict[bool, float]] = collections.defaultdict(lambda: {False: 0.0, True: 0.0})
    place = lambda row: (row.source, row.direction, row.axes)
    for row, line in moves:
        if row.ring:
            ways[place(row)][row.down] += line.seconds
    share = {key: max(way.values()) / max(sum(way.values()), 1e-30) for key, way in ways.items()}
    together = lambda row, line: dataclasses.replace(line, seconds=line.seconds * share[place(row)])
    return [(row, together(row, line) if row.ring else line) for row, line in moves]


def _merged(lines: list[Line]) -> list[Line]:
    """Lines of the same kind, label, pass, source, bound and role, added up."""
    groups: dict[tuple, list[Line]] = collections.defaultdict(list)
    for line in lines:
        groups[line.kind, line.label, line.where, line.source, line.bound, line.role].append(line)
    merged = []
    for group in groups.values():
        first, often = group[0], max(group, key=lambda line: line.times)
        longest = max(group, key=lambda line: line.seconds)
        more = f"; and {len(group) - 1} more like it" if len(group) > 1 else ""
        merged.append(
            dataclasses.replace(
                first,
                seconds=sum(line.seconds for line in group),
                hidden=sum(line.hidden for line in group),
                flops=sum(line.flops for line in group),
                num_bytes=sum(line.num_bytes for line in group),
                times=often.times,
                turns=often.turns,
                formula=longest.formula + more,
            )
        )
    return merged
