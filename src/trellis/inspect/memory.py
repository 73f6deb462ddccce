"""What one device holds, by kind and by name: before running, from types and from the compiler, and while running.

Types give the highest point of the program's own buffers: arguments by the paths to them, what the forward pass keeps
for the backward pass by the names that `save` gave. The compiler's own count stands beside it, if it was asked.
"""

import collections
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from trellis.figures import numbers
from trellis.figures.text import aligned
from trellis.inspect.buffers import KINDS, Buffer
from trellis.inspect.compiled import CompiledMemory, compiled_memory
from trellis.inspect.moved import Moved
from trellis.inspect.timeline import highest_point
from trellis.named.refusals import jaxs_in_our_words
from trellis.program import Program, trace
from trellis.program.sizes import local_bytes, typed
from trellis.program.trace import mesh_in_force, mesh_of, word_of


@dataclasses.dataclass(frozen=True)
class Memory:
    """What one device holds.

    Attributes:
        buffers: everything that is held at the highest point, by name, largest first.
        where: the line that runs there; empty if nothing does.
        kept: what the forward pass keeps for the backward pass, at the highest point or before it, largest first.
        compiled: the compiler's count, if the program was compiled.
        in_use: bytes in use by the device's own count, if it has one; only while running.
        host: bytes of the host's memory that this device's share takes, if values are moved there.
    """

    buffers: tuple[Buffer, ...]
    where: str = ""
    kept: tuple[Buffer, ...] = ()
    compiled: CompiledMemory | None = None
    in_use: int | None = None
    host: int = 0

    def per_kind(self) -> dict[str, int]:
        """Bytes by kind, in the order of `KINDS`."""
        sums: collections.Counter[str] = collections.Counter()
        for buffer in self.buffers:
            sums[buffer.kind] += buffer.num_bytes
        return {kind: sums[kind] for kind in KINDS if sums[kind]}

    def bytes_of(self, *kinds: str) -> int:
        """Bytes of the buffers of some kinds."""
        return sum(buffer.num_bytes for buffer in self.buffers if buffer.kind in kinds)

    @property
    def total(self) -> int:
        """Bytes of all buffers: the highest point, from types."""
        return sum(buffer.num_bytes for buffer in self.buffers)

    @property
    def peak(self) -> int:
        """Bytes at the highest point: by the compiler if it was asked, otherwise from types."""
        return self.compiled.peak if self.compiled else self.total

    def largest(self, kind: str = "activations") -> Buffer | None:
        """The largest of what is kept for the backward pass, all of one name together; None if nothing is.

        It answers which activation to recompute, or to move to the host, first.

        Args:
            kind: "activations", or "weights in use".
        """
        return next((buffer for buffer in _by_name(self.kept) if buffer.kind == kind), None)

    def by_name(self, kind: str | None = None) -> list[Buffer]:
        """Buffers of one name together, largest first."""
        return _by_name(buffer for buffer in self.buffers if kind in (None, buffer.kind))

    def kept_by_name(self) -> list[Buffer]:
        """The same for what is kept for the backward pass."""
        return _by_name(self.kept)

    def as_dict(self) -> dict:
        """Everything as plain data."""
        compiled = dataclasses.asdict(self.compiled) | {"peak": self.compiled.peak} if self.compiled else None
        return {
            "per_kind": self.per_kind(),
            "total": self.total,
            "peak": self.peak,
            "where": self.where,
            "buffers": [dataclasses.asdict(buffer) for buffer in self.buffers],
            "kept": [dataclasses.asdict(buffer) for buffer in self.kept],
            "compiled": compiled,
            "in_use": self.in_use,
            "host": self.host,
        }

    def to_json(self) -> str:
        """`as_dict`, as JSON."""
        return json.dumps(self.as_dict())

    def svg(self) -> str:
        """A treemap: an area for each buffer, its kind by color."""
        from trellis.figures.treemap import treemap

        return treemap([(b.kind, b.name, b.what, b.num_bytes) for b in self.by_name()], KINDS)

    _repr_svg_ = svg

    def table(self, most: int = 10) -> str:
        """As text: the sums by kind, and the largest buffers."""
        kinds = [
            (kind, numbers.size(size), f"{100 * size / max(self.total, 1):.0f} %")
            for kind, size in self.per_kind().items()
        ]
        parts = [
            aligned(
                ("kind", "bytes a device", "share"), [*kinds, ("in all", numbers.size(self.total), "")], right=(1, 2)
            )
        ]
        rows = [(numbers.size(b.num_bytes), b.kind, b.name, b.what, b.source) for b in self.by_name()[:most]]
        parts.append(aligned(("largest", "kind", "name", "type", "at"), rows, right=(0,)))
        activation = self.largest()
        if activation:
            parts.append(f"largest activation: {activation.name}, {numbers.size(activation.num_bytes)}")
        if self.host:
            parts.append(f"in the host's memory: {numbers.size(self.host)} a device")
        if self.compiled:
            c = self.compiled
            parts.append(
                f"by the compiler: peak {numbers.size(c.peak)} = arguments {numbers.size(c.arguments)} + results "
                f"{numbers.size(c.outputs)} - donated {numbers.size(c.aliased)} + temporaries "
                f"{numbers.size(c.temporaries)} + code {numbers.size(c.code)}"
                + (f"; on the host {numbers.size(c.host)}" if c.host else "")
            )
        if self.in_use is not None:
            parts.append(f"in use by the device's own count: {numbers.size(self.in_use)}")
        return "\n\n".join(parts)

    def __str__(self) -> str:
        return self.table()

    def check(self, capacity: int, changes: "Mapping[str, Callable[[], Memory]] | None" = None) -> None:
        """Refuses what does not fit.

        Args:
            capacity: bytes that a device has.
            changes: what could be done instead, by name, each with a function that finds out the memory it takes,
                called only when needed. The first three that fit are offered.

        Raises:
            NotEnoughMemory: by how much, the largest buffers by name, and the changes that make it fit.
        """
        if self.peak <= capacity:
            return
        largest = ", ".join(f"{b.name} ({b.kind}) {numbers.size(b.num_bytes)}" for b in self.by_name()[:3])
        fitting = []
        for name, found in (changes or {}).items():
            peak = found().peak
            if peak <= capacity:
                fitting.append(f"{name} ({numbers.size(peak)})")
            if len(fitting) == 3:
                break
        fix = "what fits: " + "; ".join(fitting) if fitting else "use more devices, or a smaller model or batch"
        if changes and not fitting:
            fix = f"none of {', '.join(changes)} is enough: use more devices, or a smaller model or batch"
        raise NotEnoughMemory(
            f"a step must fit in a device's memory, got {numbers.size(self.peak)} for {numbers.size(capacity)}, "
            f"{numbers.size(self.peak - capacity)} too much; largest: {largest}: {fix}"
        )


def _by_name(buffers: Iterable[Buffer]) -> list[Buffer]:
    groups: dict[tuple[str, str], list[Buffer]] = collections.defaultdict(list)
    for buffer in buffers:
        groups[buffer.kind, buffer.name].append(buffer)
    merged = []
    for first, *rest in groups.values():
        what = first.what + (f" and {len(rest)} more" if rest else "")
        size = first.num_bytes + sum(buffer.num_bytes for buffer in rest)
        merged.append(dataclasses.replace(first, what=what, num_bytes=size))
    return sorted(merged, key=lambda buffer: -buffer.num_bytes)


class NotEnoughMemory(ValueError):
    """A step that does not fit. The message says by how much, what is largest, and what would fit."""


def memory(
    fn: Callable,
    *args,
    compile: bool = True,
    kind_of: Callable[[tuple[str, ...], Any], str] | None = None,
    **kwargs,
) -> Memory:
    """What one device holds at the highest point of a call of a function, before anything runs.

    Args:
        fn: a gradient or a train step, jitted (with its donations) or not.
        *args, **kwargs: its arguments: arrays, or `jax.ShapeDtypeStruct`s with shardings.
        compile: whether the compiler is asked as well.
        kind_of: tells what an argument is, from the names on the way to it and the array. Without it, states of Optax
            are the optimizer's, other floating-point arrays in the first argument are parameters (the optimizer's, too,
            if derivatives are made of another of their shape and not of them), and everything else is the batch.
    """
    words = functools.partial(jaxs_in_our_words, getattr(fn, "__name__", "the function"), "memory")
    with words():
        program = trace(fn, *args, kind_of=kind_of, **kwargs)
    held = memory_of(program)
    if not compile:
        return held
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    with words(), mesh_in_force(mesh_of((args, kwargs))):
        counted = compiled_memory(jitted.lower(*args, **kwargs).compile())
    return dataclasses.replace(held, compiled=counted)


def memory_of(program: Program, *, held_beside: bool = False, ahead: float = 0.0, moved: Moved | None = None) -> Memory:
    """The memory of a program that was traced before, from types.

    Args:
        program: from `trace`.
        held_beside: whether SparseCores move weights and gradients beside computation, see `highest_point`.
        ahead: the share of layers written out whose weights these gather before they are needed, see there.
        moved: what its operations move, if that is read elsewhere, too.
    """
    point = highest_point(program, held_beside, ahead, moved)
    return Memory(point.buffers, point.where, point.kept, host=point.host)


def live_memory(**trees: Any) -> Memory:
    """What the fullest of this process's devices holds now.

    Args:
        **trees: arrays by what they are: `live_memory(parameters=model, optimizer=state)`. A name that is not in
            `KINDS` counts as `other`. Arrays in none of the trees are `other`, by their type.

    Returns:
        The live buffers, and the device's own count where it has one (GPU, TPU).
    """
    known: dict[int, tuple[str, str]] = {}
    for kind, tree in trees.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = ".".join(word for word in map(word_of, path) if word != "array")
            known[id(leaf)] = (kind, name or kind)
    per_device: dict[jax.Device, list[Buffer]] = collections.defaultdict(list)
    for array in jax.live_arrays():
        kind, name = known.get(id(array), ("other", "not in a tree"))
        buffer = Buffer(
            kind=kind if kind in KINDS else "other", name=name, what=typed(array), num_bytes=local_bytes(array)
        )
        for device in array.sharding.addressable_devices:
            per_device[device].append(buffer)
    if not per_device:
        return Memory(())
    device, buffers = max(per_device.items(), key=lambda pair: sum(b.num_bytes for b in pair[1]))
    stats = device.memory_stats() or {}
    return Memory(tuple(sorted(buffers, key=lambda b: -b.num_bytes)), in_use=stats.get("bytes_in_use"))


def live_bytes() -> dict[int, int]:
    """Bytes of live arrays on each of this process's devices, by the device's id: uneven if an array that was to be
    distributed was first made on one device."""
    held = dict.fromkeys((device.id for device in jax.local_devices()), 0)
    for array in jax.live_arrays():
        for device in array.sharding.addressable_devices:  # asking for the shards would make arrays of them
            held[device.id] += local_bytes(array)
    return held
