"""The memory of one device through a program, from types alone: named buffers, and the highest point.

A program is run in order with sizes for values: an argument lives as long as its owner keeps it, a value lives from the
operation that makes it to the last that reads it, a loop's stacked outputs from the loop's start, and what an
operation's implied moves make, such as an operand that a product gathers, while it runs. What a compiler fuses takes no
memory of its own: the value of an elementwise chain exists when something that is not elementwise (a product, a kernel,
a collective, a loop, an output) reads it, and until then keeps alive what it is made of. Where that is more, and only
the backward pass reads on, it exists at the end of its forward pass.
"""

import collections
import dataclasses
from collections.abc import Iterable

from trellis.inspect import fusion
from trellis.inspect.apart import in_lanes
from trellis.inspect.buffers import KINDS, Buffer
from trellis.inspect.held import Held, Room
from trellis.inspect.moved import Moved
from trellis.program import Body, Operation, Program, Value
from trellis.program.flow import last_forward, last_uses, weights_in_use
from trellis.program.said import held_said
from trellis.program.scopes import turns_written_out

# What the compiler's allocator loses between buffers, as a share of everything that is not an argument. The layouts of
# compiled train steps lost between 0.3 and 7 %.
FRAGMENTATION = 0.02
# The vector memory of a TPU, where a loop's small buffers go.
VECTOR_MEMORY = 128 * 2**20
# What belongs to the backward pass.
_BACKWARD = ("recomputed", "backward")
# Operations that read what is one step from memory as they go, and need no copy of it.
_READ_THROUGH = ("dot_general", "gather", "reshard", "scatter-add")
# Operations whose results are what is moved.
_MOVES = ("reshard", "sharding_constraint")
_BROUGHT = {"all-gather": ", gathered", "reduce-scatter": ", before it is scattered"}


@dataclasses.dataclass(frozen=True, slots=True)
class HighestPoint:
    """A program's memory at its highest point, on one device.

    Attributes:
        buffers: what is held there, largest first.
        where: the line that runs there; empty if nothing does.
        kept: what the forward pass keeps for the backward pass, there or earlier, largest first.
        host: bytes that this device's share takes of the host's memory.
    """

    buffers: tuple[Buffer, ...]
    where: str
    kept: tuple[Buffer, ...]
    host: int


def highest_point(program: Program, held: bool = False, ahead: float = 0.0, moved: Moved | None = None) -> HighestPoint:
    """The highest point of a program's memory on one device.

    Args:
        program: a train step, or any other.
        held: whether SparseCores move weights and gradients beside computation. What is gathered, and what is summed
            over several mesh axes at once, then stays in place until a loop over layers ends its turn, beside what
            moves for the next, and that room is lost to large buffers at the highest point.
        ahead: the share of layers that are written out whose weights are then gathered for the backward pass before
            they are needed.
        moved: what its operations move, if that is read elsewhere, too.
    """
    moved = moved or Moved(program)
    walk = _Walk(program, weights_in_use(program), moved, held, fusion.multiplies_as_read(program))
    for value, argument in zip(program.inputs, program.arguments, strict=True):
        kind = argument.kind if argument.kind in KINDS else "other"
        held_there = Held(Room(kind, value.device_bytes, value), pinned=True)
        held_there.given = not argument.donated
        walk.enter(value, held_there)
    walk.mark(0, (), "")
    walk.run()
    walk.keep_results([a.donated for a in program.arguments])
    arguments = sum(value.device_bytes for value in program.inputs)
    host = walk.host + sum(value.num_bytes for value in program.inputs if value.on_host)
    lost = int(FRAGMENTATION * (walk.peak - arguments)) + walk.lost_to_loops()
    between = Buffer(kind="fragmentation", name="between buffers", what="", num_bytes=lost)
    kinds = lambda room: "activations" if room in walk.kept and room.kind == "temporaries" else room.kind
    described = lambda rooms: [
        dataclasses.replace(room, kind=kinds(room)).buffer(program) for room in rooms if room.num_bytes
    ]
    buffers, kept = described(walk.at_peak), described(walk.kept)
    if early := int(walk.again * ahead) if held else 0:
        buffers.append(
            Buffer(kind="weights in use", name="of layers written out, gathered ahead", what="", num_bytes=early)
        )
    ordered = lambda buffers: tuple(sorted(buffers, key=lambda buffer: -buffer.num_bytes))
    return HighestPoint(ordered([*buffers, *[between] * bool(lost)]), walk.where, ordered(kept), host)


class _Walk:
    """A run through one body: the program, or one turn of a loop or a branch."""

    def __init__(self, body: Body, weights: set[Value], implied: Moved, held: bool, as_read: bool):
        self.body, self.weights, self.implied, self.held, self.as_read = body, weights, implied, held, as_read
        self.top = isinstance(body, Program)
        self.in_lanes = in_lanes(body) if self.top and as_read else set()
        self.moved = 0  # bytes of weights that are gathered and of gradients that are summed over devices
        self.again = 0  # bytes of weights that layers which are written out gather for the backward pass
        self.loops: list[tuple[int, set[Room]]] = []  # the bytes of each one's body, and what is around it
        self.values: dict[Value, Held] = {}
        self.live: dict[int, Held] = {}
        self.total = 0
        self.peak, self.at_peak, self.where = 0, (), ""
        self.kept: dict[Room, None] = {}  # what the forward pass keeps for the backward pass, in order
        self.forward = False  # whether something of the forward pass came after the last of the backward pass
        self.host = 0  # bytes of the host's memory that its results, and those of its loops, take
        self.lazy, self.results = fusion.fused_results(body), set(body.results)
        self.updating, self.turning = fusion.read_in(body, ("update",)), fusion.read_in(body, _BACKWARD)
        self.fences = collections.Counter(map(_alike, filter(_fences, body.operations)))  # those still to come
        self.last = last_uses(body)
        self.ends, self.forward_ends = collections.defaultdict(list), collections.defaultdict(list)
        for value, last in self.last.items():
            self.ends[last].append(value)
        for value, last in last_forward(body).items():
            if value in self.turning:
                self.forward_ends[last].append(value)

    # What is there.

    def enter(self, value: Value, held: Held) -> None:
        """A value that is there before the first operation."""
        held.uses += value in self.last
        self.values[value] = held
        self.add(held)

    def of(self, value: Value) -> Held:
        if value not in self.values:  # a constant
            self.values[value] = Held(None, pinned=True)
        return self.values[value]

    def add(self, held: Held) -> None:
        if held.buffer is not None and id(held) not in self.live:
            self.live[id(held)] = held
            self.total += held.buffer.num_bytes

    def drop(self, held: Held) -> list[Held]:
        """Lets go of what nothing uses any more, and of what it was made of; returns what was in memory."""
        if held.pinned or held.uses > 0:
            return []
        ended = []
        if held.buffer is not None and self.live.pop(id(held), None):
            self.total -= held.buffer.num_bytes
            ended = [held]
        for part in held.made_of:
            part.uses -= 1
            ended += self.drop(part)
        return ended

    def mark(self, extra: int, buffers: tuple[Room, ...], where: str) -> None:
        if self.total + extra > self.peak:
            self.peak = self.total + extra
            self.at_peak = tuple(held.buffer for held in self.live.values() if held.buffer) + buffers
            self.where = where

    def room(self, operation: Operation, value: Value) -> Room:
        """The memory of a value that an operation makes or reads."""
        made = value.maker.direction if value.maker is not None else ""
        given = made == "backward" and (self.top and value in self.results or value in self.updating)
        kind = "weights in use" if value in self.weights else "temporaries"
        if kind == "temporaries" and (value.state.pending or given):
            kind = "gradients"
        filled = operation.name == "pallas_call" or value in self.in_lanes
        return Room(kind, fusion.stored_bytes(value, filled), value, operation)

    def turn_back(self) -> None:
        """The backward pass begins, or goes on: what the forward pass made and it reads is there."""
        for value, held in self.values.items():
            if value.maker is None or value.maker.direction != "forward" or value not in self.turning:
                continue
            self.kept |= dict.fromkeys(
                part.buffer for part in (held, *held.leaves()) if part.buffer and not part.pinned
            )

    def realize(self, operation: Operation, value: Value) -> None:
        """A fused chain's value comes into being; what it was made of is released."""
        held = self.of(value)
        if not held.fused:
            return
        links, total = held.leaves(), self.total
        last = [part for part in held.made_of if part.buffer and part.uses == 1]
        ended = self.write(operation, held, value)
        # An elementwise result takes the place of an operand of its size that ends here, on GPUs also of an operand of
        # a link of its chain; otherwise both exist a while.
        size = held.buffer.num_bytes
        if all(other.buffer.num_bytes != size for other in (last if self.as_read else (*last, *ended))):
            self.mark(total + size - self.total, tuple(other.buffer for other in ended), operation.source)
        for link in links:
            if link.better_written():
                self.write(operation, link, link.value)

    def write(self, operation: Operation, held: Held, value: Value) -> list[Held]:
        """A chain, or a link of one, comes into being. What it was made of is released; returns what of it ends."""
        held.buffer, parts, held.made_of = self.room(operation, value), held.made_of, ()
        ended = []
        for part in parts:
            part.uses -= 1
            ended += self.drop(part)
        self.add(held)
        return ended

    def keep_results(self, donated: list[bool]) -> None:
        """Results that no operation wrote take a donated argument's memory of their size, or some of their own; so do
        other views of an argument that is not donated."""
        free = collections.Counter(v.num_bytes for v, given in zip(self.body.inputs, donated) if given)
        for value in self.body.results:
            if value.literal is None and self.of(value).fused and value.maker is not None:
                if free[value.num_bytes]:
                    free[value.num_bytes] -= 1
                else:
                    self.realize(value.maker, value)
            elif value.literal is None and value.maker is not None and self.of(value).given:
                self.make(value, self.room(value.maker, value))
        self.mark(0, (), "")

    # What happens.

    def run(self) -> None:
        for operation in self.body.operations:
            self.operation(operation)
            unread = [value for value in operation.results if value not in self.last]
            for value in (*self.ends[operation.number], *unread):
                if value in self.values:
                    held = self.values.pop(value)
                    held.uses -= value in self.last
                    self.drop(held)
            for value in self.forward_ends[operation.number]:
                held = self.values.get(value)
                for link in (held, *held.leaves()) if held else ():
                    if link.better_written():
                        self.write(operation, link, link.value)

    def operation(self, operation: Operation) -> None:
        if self.forward and operation.direction in _BACKWARD:
            self.turn_back()
        self.forward = operation.direction == "forward" or self.forward and operation.direction not in _BACKWARD
        lazy, brought = operation in self.lazy, {} if operation.bodies else self.bring(operation)
        if lazy and not self.as_read:  # what adds to the product is fused with it, not what it multiplies
            self.read(operation)
        if lazy or not fusion.writes(operation):
            self.fuse(operation, lazy, brought)
            return
        self.read(operation)
        if operation.bodies:
            self.loop(operation)
            return
        for position, value in enumerate(operation.results):
            same = fusion.in_place(operation, position)
            if same is not None and not (fusion.updates(operation) and self.stays(same, operation)):
                self.of(same).uses += 1
                self.values[value] = self.of(same)
                continue
            held = self.make(value, self.room(operation, value))
            self.host += value.num_bytes * (value.on_host and (self.top or value not in self.body.results))
            if operation.name == "reshard":
                self.gather_again(operation, held.buffer)
                self.moved += held.buffer.num_bytes if value in self.weights else fusion.summed_whole(operation)
            if self.top and fusion.gathers_columns(operation):
                copy = dataclasses.replace(held.buffer, suffix=", transposed")
                self.mark(copy.num_bytes, (copy,), operation.source)
        self.mark(0, (), operation.source)
        self.release(brought.values())

    def stays(self, value: Value, operation: Operation) -> bool:
        """Whether what an operation updates is there afterwards, too: the compiler copies it first."""
        held, read = self.of(value), lambda each: any(reader.number > operation.number for reader in each.readers)
        alike = (each for each, other in self.values.items() if other is held)  # it, and other views of its memory
        return held.given or any(each in self.results or read(each) for each in alike)

    def bring(self, operation: Operation) -> dict[Value, Held]:
        """What an operation's implied moves make, by what they move: operands, or sums that are scattered next. The
        other moves are results themselves."""
        brought: dict[Value, Held] = {}
        for implied in self.implied.by(operation):
            if operation.name in _MOVES or implied.move.kind == "all-reduce":
                continue
            value = implied.operand or operation.results[0]
            if implied.operand:
                self.realize(operation, value)
            said = _BROUGHT.get(implied.move.kind, ", on other devices")
            room = dataclasses.replace(self.room(operation, value), num_bytes=implied.move.payload, suffix=said)
            earlier = brought.pop(value, None)
            brought[value] = held = Held(room)
            held.uses = 1
            self.add(held)
            self.gather_again(operation, room)
            copy = dataclasses.replace(room, suffix=room.suffix + ", transposed")
            copies = (copy,) * (self.top and fusion.of_columns(implied))
            self.mark(room.num_bytes * len(copies), copies, operation.source)
            self.release([earlier] if earlier else [])
        return brought

    def gather_again(self, operation: Operation, room: Room) -> None:
        """Counts weights that a layer which is written out gathers for the backward pass."""
        weights = room.kind == "weights in use" and operation.direction in _BACKWARD
        self.again += room.num_bytes * (weights and self.top and turns_written_out(operation.scope) > 1)

    def release(self, brought: Iterable[Held]) -> None:
        """Lets go of what moves have made, unless a chain keeps it alive."""
        for held in brought:
            held.uses -= 1
            self.drop(held)

    def read(self, operation: Operation) -> None:
        """What an operation reads comes into being, unless it is made as it is read. On GPUs one kernel makes all that
        goes through a fence, so what it reads stays until the last of it."""
        together = operation.name == "optimization_barrier" and not self.as_read
        fused = [value for value in operation.inputs if self.of(value).fused] if together else []
        parts = [part for value in fused for part in self.of(value).made_of]
        for part in parts:
            part.uses += 1
        if fused:
            self.fences[_alike(operation)] -= 1
            self.read_beside(operation, self.fences[_alike(operation)], fused)
        for value in operation.inputs:
            if fused and value is fused[-1]:
                for part in parts:
                    part.uses -= 1
                    self.drop(part)
            if not self.read_as_made(operation, value):
                self.realize(operation, value)

    def read_beside(self, operation: Operation, count: int, fused: list[Value]) -> None:
        """What further fences of the same line read is there, too, since XLA makes all of it in one kernel, such as
        the gradients of two products in their rounded forms: as much as is made for this one alone."""
        links = {link: None for value in fused for link in self.of(value).leaves() if link.buffer and not link.pinned}
        rooms = [link.buffer for link in links]
        mine = [room for room in rooms if room.operation and _line(room.operation) == _line(operation)]
        self.mark(count * sum(room.num_bytes for room in mine), tuple(mine) * count, operation.source)

    def make(self, value: Value, room: Room) -> Held:
        """The memory of a result."""
        held = self.values[value] = Held(room)
        held.uses = 1
        self.add(held)
        return held

    def fuse(self, operation: Operation, lazy: bool, brought: dict[Value, Held]) -> None:
        """An operation without memory of its own: its results are views of an operand, or links of a chain, as it lies
        after its moves."""
        operands = [brought.get(value) or self.of(value) for value in operation.inputs]
        if fusion.is_view(operation) and not lazy:
            operands[0].uses += 1
            self.values[operation.results[0]] = operands[0]
            self.release(brought.values())
            return
        for value in operation.results:
            held = self.values[value] = Held(None, tuple(dict.fromkeys(operands)))
            for part in held.made_of:
                part.uses += 1
            held.uses, held.lazy, held.value = 1, lazy, value
        self.release(brought.values())

    def read_as_made(self, operation: Operation, value: Value) -> bool:
        """Whether an operation reads a chain without its value in memory."""
        held, name = self.of(value), operation.name
        written = fusion.updates(operation) and value is operation.operands[0]
        if name in _READ_THROUGH and held.buffer is None and held.near_memory() and not written:
            return not self.sums_a_cast(operation, held, value)
        if not held.fused:
            return False
        sizes = [part.buffer.num_bytes for part in held.leaves() if part.buffer]
        # A broadcast of something small, which the compiler makes again inside the loop.
        if operation.is_loop and sum(sizes) * 8 <= value.num_bytes:
            return True
        # If something twice as large exists, a product makes what it reads from that as it reads it, such as the
        # bfloat16 gradients of float32 logits. Kernels for GPUs read them in their own type from memory.
        wide = any(size >= 2 * value.num_bytes for size in sizes)
        if wide and self.as_read and name == "dot_general" and not held.multiplied():
            return True
        return fusion.reduces(operation)

    def sums_a_cast(self, operation: Operation, held: Held, value: Value) -> bool:
        """Whether an operation sums over devices what is cast from a wider array in memory, such as a table's gradient:
        what is sent is there beside that."""
        if operation.name != "reshard" or not value.state.pending - operation.results[0].state.pending:
            return False
        wider = [part.buffer for part in held.made_of if part.buffer and part.buffer.num_bytes > value.device_bytes]
        return not (held.lazy or held.pinned) and bool(wider)

    def loop(self, operation: Operation) -> None:
        """A loop or branches: the highest point of a turn, or of the branch that takes most, comes on top of what is
        around it."""
        first, carried = operation.carries
        for value in operation.results[carried:]:
            self.make(value, self.room(operation, value))
            self.host += value.num_bytes * value.on_host
        bodies = operation.bodies if operation.name == "cond" else operation.bodies[-1:]
        carried_in = operation.entering(bodies[-1])[first : first + carried]
        carries = [self.carry(operation, *each, last) for each, last in zip(carried_in, bodies[-1].results)]
        walks = [_Walk(body, self.weights, self.implied, self.held, self.as_read) for body in bodies]
        for inner in walks:
            for value in inner.body.inputs:  # carries are counted here, constants and slices of stacks read in place
                inner.enter(value, Held(None, pinned=True))
            for value, _ in carried_in:
                inner.of(value).around = True
            inner.run()
        inner = max(walks, key=lambda walk: walk.peak)
        self.host += inner.host
        self.kept |= inner.kept
        where, around = inner.where or operation.source, {held.buffer for held in self.live.values()}
        if self.held:
            moved = Room("weights in use", inner.moved, None, operation)
            self.mark(inner.peak + inner.moved, (*inner.at_peak, moved), where)
            self.loops.append((inner.peak, around))
        else:
            self.mark(inner.peak, inner.at_peak, where)
        for value, held in zip(operation.results[:carried], carries):
            self.values[value] = held
            held.pinned, held.uses = held.around, 1

    def carry(self, operation: Operation, inner: Value, outer: Value, last: Value) -> Held:
        """A loop's carry, in the place of its first value if that ends here.

        Args:
            operation: the loop.
            inner: the carry in the loop.
            outer: its first value.
            last: its value at the end of a turn.
        """
        held = Held(self.room(operation, inner), pinned=True)
        passes = {value.maker.direction for value in last.maker.inputs if value.maker} if last.maker else ()
        if "backward" in passes and last.maker.direction == "update":  # the sum over microbatches
            held.buffer = dataclasses.replace(held.buffer, kind="gradients")
        if outer.maker is not None and (said := held_said(outer.maker)):
            held.buffer = dataclasses.replace(held.buffer, kind=said)
            if said == "activations":
                self.kept[held.buffer] = None
        old = self.of(outer) if outer.literal is None else None
        if old is not None and old.around and old.uses <= 1:  # a loop in a loop that carries the same
            return old
        if old is not None and old.buffer is not None and old.uses <= 1 and not old.pinned:
            held.buffer = dataclasses.replace(held.buffer, kind=old.buffer.kind)
            if self.live.pop(id(old), None):
                self.total -= old.buffer.num_bytes
            old.buffer = None
        self.add(held)
        return held

    def lost_to_loops(self) -> int:
        """Bytes that the largest loop took, except for vector memory, and that are empty at the highest point: buffers
        larger than half of that room were not seen to be put there."""
        room, around = max(self.loops, key=lambda loop: loop[0], default=(0, set()))
        later = [taken.num_bytes for taken in self.at_peak if taken not in around]
        return max(room - VECTOR_MEMORY - sum(size for size in later if size <= room / 2), 0)


def _fences(operation: Operation) -> bool:
    return operation.name == "optimization_barrier"


def _line(operation: Operation) -> tuple:
    """The line that an operation is of, in which layer and which pass."""
    return operation.source, operation.scope, operation.direction


def _alike(operation: Operation) -> tuple:
    """What fences have in common that XLA for GPUs makes together."""
    return _line(operation), tuple((value.local_shape, str(value.aval.dtype)) for value in operation.inputs)
