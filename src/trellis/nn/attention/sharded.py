"""Attention on a mesh: where queries, keys and values are, and the program for positions that are whole."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from trellis._compat import refuses_copies
from trellis.errors import TrellisError
from trellis.mesh.by_device import by_device
from trellis.mesh.layout import current_layout
from trellis.mesh.manual.ops import Axes, vary
from trellis.mesh.parts import part_of
from trellis.notation import spec_of
from trellis.notation.state import state_of


class PlacementError(TrellisError, ValueError):
    """Shardings of queries, keys and values under which a device does not hold what it needs."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Which mesh axes slice queries, keys and values; without a mesh, none.

    Attributes:
        mesh: the abstract mesh in the arrays' types, or None.
        batch, pos, heads: mesh axes of those dimensions.
        key_pos: mesh axes of the keys' positions: those of `pos`, or the major ones of them.
        kv_heads: mesh axes of the keys' heads: those of `heads`, or the major ones of them.
        copied: mesh axes along which keys are in the `~` state, and likewise for values.
    """

    mesh: jax.sharding.AbstractMesh | None
    batch: Axes = ()
    pos: Axes = ()
    heads: Axes = ()
    key_pos: Axes = ()
    kv_heads: Axes = ()
    copied: tuple[frozenset[str], ...] = (frozenset(),) * 3

    def shards(self, axes: Axes) -> int:
        """Over how many devices a dimension with these mesh axes is sharded."""
        return math.prod(self.mesh.shape[axis] for axis in axes) if self.mesh is not None else 1

    def run(self, kernel: Callable, arrays: tuple, tables=(), table_specs=(), *, check: bool = True) -> jax.Array:
        """Calls `kernel(q, k, v, segment_ids, *tables)` on each device's part, if positions are whole.

        `tables` are more arguments, with their specs. `check` is `jax.shard_map`'s `check_vma`.
        """
        if self.mesh is None:
            return kernel(*arrays[:3], arrays[3:] or None, *tables)
        layout = current_layout()
        if layout is not None and layout.mapped and any(self.copied):
            place, plain = self.without_copies(arrays)
            return place.run(kernel, plain, tables, table_specs, check=check)

        used = self.batch + self.heads

        def body(tables, *parts):
            q, k, v, *ids = parts
            if check:
                q, k, v, *ids = (vary(x, used) for x in (q, k, v, *ids))
            k, v = (self.own_heads(x, q.shape[2]) for x in (k, v))
            return kernel(q, k, v, tuple(ids) or None, *tables)

        specs = self._specs(len(arrays))
        call = by_device(body, mesh=self.mesh, in_specs=(table_specs, *specs), out_specs=specs[0], check_vma=check)
        try:
            return call(tables, *arrays)
        except ValueError as error:  # mapped over a name that is whole, where `layout.mapped` is empty
            if not any(self.copied) or not refuses_copies(error):
                raise
        place, plain = self.without_copies(arrays)
        return place.run(kernel, plain, tables, table_specs, check=check)

    def without_copies(self, arrays) -> tuple["Placement", tuple]:
        """The same arrays without copies: under a vmap over a mesh axis JAX (0.10.2 to 0.12) takes no copies into a
        shard_map."""
        plain = tuple(None if x is None else jax.reshard(x, spec_of(state_of(x).axes)) for x in arrays)
        return replace(self, copied=(frozenset(),) * 3), plain

    def _specs(self, count: int) -> tuple[PartitionSpec, ...]:
        batch, heads, kv_heads = (axes or None for axes in (self.batch, self.heads, self.kv_heads))
        q = PartitionSpec(batch, None, heads, None, reduced=self.copied[0])
        k, v = (PartitionSpec(batch, None, kv_heads, None, reduced=copied) for copied in self.copied[1:])
        return (q, k, v, PartitionSpec(batch, None), PartitionSpec(batch, None))[:count]

    def own_heads(self, x, local_heads: int):
        """The kv heads that this device's query heads read, if query heads are sliced over more mesh axes."""
        more = self.heads[len(self.kv_heads) :]
        if not more:
            return x
        groups = local_heads * self.shards(more) // x.shape[2]
        if local_heads % groups and groups % local_heads:  # parts of groups: a key head for each query head
            x, groups = jnp.repeat(x, groups, axis=2), 1
        first = lax.axis_index(more) * local_heads // groups
        return part_of(x, first, max(1, local_heads // groups), 2)


def meeting_slices(q, k, v, sinks) -> tuple:
    """The operands of attention, as copies (`~x`) only over mesh axes that slice what they meet.

    Over another axis each device has the whole gradient, not a part of a sum.
    """
    queries, keys = (frozenset(state_of(x).sliced) for x in (q, k))
    of_positions = frozenset(axis for axes in state_of(q).axes[:2] for axis in axes)
    return _copied_over(q, keys), _copied_over(k, queries), _copied_over(v, queries), _copied_over(sinks, of_positions)


def _copied_over(x, axes: frozenset[str]):
    state = None if x is None else state_of(x)
    if state is None or state.copied <= axes:
        return x
    return jax.reshard(x, spec_of(state.axes, state.pending, state.copied & axes))


def placement_of(q, k, v) -> Placement:
    """Reads the placement off the arrays' types.

    Raises:
        PlacementError: a device would not hold the keys that its queries need.
    """
    states = [state_of(x) for x in (q, k, v)]
    if states[0].mode != "explicit":
        return Placement(None)
    batch, pos, heads, head_dim = states[0].axes
    shown = ", ".join(f"{name} {jax.typeof(x).str_short()}" for name, x in zip("qkv", (q, k, v), strict=True))

    def fail(rule: str, fix: str):
        raise PlacementError(f"{rule}, got {shown}, in attention: {fix}")

    if any(state.pending for state in states):
        fail("attention is not linear, so no operand can be a pending sum", "settle it first with reshard")
    key_pos, kv_heads = states[1].axes[1:3]
    if key_pos and q.shape[1] != k.shape[1]:
        fail("sliced queries and keys must have the same number of positions",
             "exchange positions for heads (the layout's context, exchange), or leave pos whole")  # fmt: skip
    if key_pos != pos[: len(key_pos)]:
        fail("keys and values must be whole along key_pos, or sliced over the mesh axes of pos or its major ones",
             "gather them first: reshard('... key_pos/x ... -> ... key_pos')")  # fmt: skip
    for state in states[1:]:
        if state.axes[0] != batch or state.axes[1:3] != (key_pos, kv_heads):
            fail("queries, keys and values must be sharded the same way along batch, keys and values along all "
                "dimensions",
                 "reshard one of them")  # fmt: skip
        if head_dim or state.axes[3]:
            fail("head_dim must be whole", "gather it first, or shard heads instead")
    mesh = jax.typeof(q).sharding.mesh
    place = Placement(mesh, batch, pos, heads, key_pos, kv_heads, tuple(state.copied for state in states))
    if kv_heads != heads[: len(kv_heads)]:
        fail("kv_heads must be sharded like heads, or over the major ones of their mesh axes, or whole",
             "shard kv_heads like heads, or leave them whole")  # fmt: skip
    return place
