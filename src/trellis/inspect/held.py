"""What one device holds while a program runs: memory, or chains of operations that will be fused into their readers."""

import dataclasses

from trellis.inspect.buffers import Buffer, describe
from trellis.program import Operation, Program, Value


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Room:
    """Memory that is taken: its kind and bytes, the value in it, and the operation that makes or reads that first."""

    kind: str
    num_bytes: int
    value: Value | None = None
    operation: Operation | None = None
    suffix: str = ""

    def buffer(self, program: Program) -> Buffer:
        """The same with a name, for people."""
        name, what, source = "and gradients on the way", "", self.operation.source if self.operation else ""
        if self.operation is None or self.value in program.inputs:
            argument = program.arguments[program.inputs.index(self.value)]
            name, what = argument.name, argument.what
        elif self.value is not None:
            name, what, source = describe(self.value, self.operation, program)
        return Buffer(kind=self.kind, name=name + self.suffix, what=what, num_bytes=self.num_bytes, source=source)


class Held:
    """A value during the walk: memory that exists, or a chain that will be fused into its reader.

    Attributes:
        buffer: its memory; None for a chain, and for what belongs to the program around.
        made_of: for a chain, what it keeps alive.
        pinned: whether it stays to the end.
        uses: by how many values and chains it is kept alive.
        lazy: whether its reader makes it, although it would usually be written.
        value: for a chain, what it is.
        around: whether it is a loop's carry, seen from inside: its memory is counted outside the loop.
        given: whether it is an argument that the caller keeps: nothing is written there.
    """

    __slots__ = ("buffer", "made_of", "uses", "pinned", "lazy", "around", "value", "given")

    def __init__(self, buffer: Room | None, made_of: "tuple[Held, ...]" = (), pinned: bool = False):
        self.buffer, self.made_of, self.pinned, self.uses = buffer, made_of, pinned, 0
        self.lazy = self.around = self.given = False
        self.value: Value | None = None

    def leaves(self) -> "list[Held]":
        """What a chain that does not exist yet is made of."""
        seen, todo, found = set(), list(self.made_of), []
        while todo:
            part = todo.pop()
            if id(part) not in seen:
                seen.add(id(part))
                found.append(part)
                todo += part.made_of
        return found

    def multiplied(self) -> bool:
        """Whether a product is a link of the chain, which nothing makes as it reads it."""
        return any(part.lazy and part.buffer is None for part in (self, *self.leaves()))

    def better_written(self) -> bool:
        """Whether a link of a chain that something else reads later is written: products are not made twice, and it may
        be smaller than what it alone keeps alive."""
        if self.buffer is not None or self.pinned or not self.uses or self.value is None:
            return False
        return self.lazy or self.alone() > self.value.device_bytes

    def alone(self) -> int:
        """The bytes of what nothing but this chain keeps alive, and of products in it, which would be written."""
        found, todo, others = 0, list(self.made_of), {}
        while todo:
            part = todo.pop()
            others[part] = others.get(part, part.uses) - 1
            if not others[part] and not part.pinned:
                todo += part.made_of
                if part.buffer is not None:
                    found += part.buffer.num_bytes
                elif part.lazy and part.value is not None:
                    found += part.value.device_bytes
        return found

    @property
    def fused(self) -> bool:
        """Whether there is no memory of it in this program."""
        return self.buffer is None and not self.pinned

    def near_memory(self) -> bool:
        """Whether it is one step from memory, or is a lookup that is done by parts."""
        if self.lazy or self.pinned:
            return True
        return len(self.made_of) == 1 and (self.made_of[0].pinned or self.made_of[0].buffer is not None)
