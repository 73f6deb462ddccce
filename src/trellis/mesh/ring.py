"""Rings: slices pass from device to device while each device multiplies what it has.

A ring is what an all-gather or a reduce-scatter is made of, taken apart so that products run between its steps.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from trellis.notation import NotationError


class RingError(NotationError):
    """Sizes, chunks or mesh axes that a ring cannot divide or does not have."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """How slices travel along a mesh axis.

    Attributes:
        axis: the mesh axis.
        both_ways: half of each slice travels up the axis and half down, so that links work in both directions. One
            step then takes half the time where the hardware has two-way links, and products are half as large.
        chunks: how many parts each slice has in each direction. More chunks start sooner and cost smaller products.
    """

    axis: str
    both_ways: bool = False
    chunks: int = 1

    def __post_init__(self):
        if self.chunks < 1:
            raise RingError(
                f"a slice travels in at least one chunk, got chunks={self.chunks}, in Ring('{self.axis}'): pass 1 or "
                "more"
            )

    @property
    def parts(self) -> int:
        """Parts that a slice travels in; part `i` of a two-way ring travels up where `i` is even."""
        return self.chunks * (2 if self.both_ways else 1)

    def direction(self, part: int) -> int:
        return -1 if self.both_ways and part % 2 else 1


Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Moved:
    """What travels: the name that the mesh axis slices, and the name that divides a slice into parts.

    Attributes:
        name: the dimension that is whole in a product, one slice of it at a time.
        size: the size of one slice.
        rows: the dimension whose parts travel on their own; may be `name`.
        part: the size of one part of `rows`.
        text: the type of what travels, for the ledger.
    """

    name: str
    size: int
    rows: str
    part: int
    text: str

    def region(self, owner, part: int) -> dict[str, tuple[object, int]]:
        """Start and length, in arrays that have these names whole, of one part of one device's slice."""
        if self.rows == self.name:
            return {self.name: (owner * self.size + part * self.part, self.part)}
        return {self.name: (owner * self.size, self.size), self.rows: (part * self.part, self.part)}


def gather_products(
    ring: Ring,
    moved: Moved,
    names: Names,
    x,
    others: Sequence[tuple[Names, jax.Array]],
    results: Sequence[Names],
    dtypes,
    *,
    keep: bool = False,
) -> list[jax.Array]:
    """Products of a gathered `x` with each of `others`, made of the slices as they pass.

    Args:
        moved: a name of `x`. Where it is also in `others` it is summed slice by slice, else it is whole in the result.
        names: those of `x`.
        others: names and array, whole in `moved.name`.
        results: the names of each product.
        dtypes: the dtype of each product; sums over slices are in float32 at least.
        keep: whether the whole `x` is returned too, last. Otherwise it never is whole.
    """
    found = [_Result(ring, moved, result) for result in results]
    passed = _Result(ring, moved, names)
    for offset, part, piece in _passing(ring, moved, names, x):
        owner = _device(ring, offset)
        region = moved.region(owner, part)
        for (other_names, other), result in zip(others, found, strict=True):
            product = local_product(names, piece, other_names, _cut(other, other_names, region), result.names)
            result.add(offset, part, product)
        passed.add(offset, part, piece)
    whole = [result.whole(dtype) for result, dtype in zip(found, dtypes, strict=True)]
    return [*whole, passed.whole(x.dtype)] if keep else whole


def scatter_products(
    ring: Ring,
    moved: Moved,
    names: Names,
    pairs: Sequence[tuple[Names, jax.Array, Names, jax.Array]],
    dtype,
    *,
    plus: jax.Array | None = None,
) -> jax.Array:
    """A device's slice of the sum of products over all devices: the partial sums travel, each device adds its own.

    Args:
        moved: the name of the result that ends sliced.
        names: those of the result.
        pairs: factors of the products that are added up, whole in `moved.name` where they have it.
        dtype: of the result and of what travels; each addition is in float32 at least.
        plus: another partial sum, with `names`, whole in `moved.name`.
    """
    size = lax.axis_size(ring.axis)
    sums: list = [None] * ring.parts
    for step in range(size):
        for part in range(ring.parts):
            target = _device(ring, ring.direction(part) * (size - 1 - step))
            region = moved.region(target, part)
            own = functools.reduce(
                jnp.add,
                [
                    local_product(a_names, _cut(a, a_names, region), b_names, _cut(b, b_names, region), names)
                    for a_names, a, b_names, b in pairs
                ],
            )
            if plus is not None:
                own = own + _cut(plus, names, region).astype(own.dtype)
            if step:
                own = own + _pass(ring, moved, sums[part], part).astype(own.dtype)
            sums[part] = own.astype(dtype)
    return _join(sums, names, moved.rows)


class _Result:
    """One product, as its slices come in."""

    def __init__(self, ring: Ring, moved: Moved, names: Names):
        self.ring, self.moved, self.names = ring, moved, names
        self.slices: dict[tuple[int, int], jax.Array] = {}

    def add(self, offset: int, part: int, product) -> None:
        # The same place of the result may be reached by several slices (where their name is summed) or parts.
        offset = offset % lax.axis_size(self.ring.axis) if self.moved.name in self.names else 0
        part = part if self.moved.rows in self.names else 0
        held = self.slices.get((offset, part))
        self.slices[offset, part] = product if held is None else held + product

    def whole(self, dtype) -> jax.Array:
        offsets = sorted({offset for offset, _ in self.slices})
        parts = sorted({part for _, part in self.slices})
        joined = {
            offset: _join([self.slices[offset, p].astype(dtype) for p in parts], self.names, self.moved.rows)
            for offset in offsets
        }
        if self.moved.name not in self.names:
            return joined[0]
        dim, count = self.names.index(self.moved.name), len(offsets)
        shape = list(joined[0].shape)
        shape[dim] *= count
        out = jnp.zeros_like(joined[0], shape=shape)
        for offset in offsets:
            start = _device(self.ring, offset) * self.moved.size
            out = lax.dynamic_update_slice_in_dim(out, joined[offset], start, dim)
        return out


def _passing(ring: Ring, moved: Moved, names: Names, x) -> Iterator[tuple[int, int, jax.Array]]:
    """Every device's parts of `x` as they come by: whose (places from here), which part, and the part."""
    dim = names.index(moved.rows)
    parts = [lax.slice_in_dim(x, p * moved.part, (p + 1) * moved.part, axis=dim) for p in range(ring.parts)]
    size = lax.axis_size(ring.axis)
    for step in range(size):
        # What the next step needs leaves before this step's products.
        coming = [_pass(ring, moved, piece, p) for p, piece in enumerate(parts)] if step + 1 < size else parts
        for part, piece in enumerate(parts):
            yield -ring.direction(part) * step, part, piece
        parts = coming


def _pass(ring: Ring, moved: Moved, x, part: int):
    size, by = lax.axis_size(ring.axis), ring.direction(part)
    # The ledger reads the names off this scope.
    with jax.named_scope(f"ring[{moved.text} -> {moved.text}]"):
        return lax.ppermute(x, ring.axis, [(i, (i + by) % size) for i in range(size)])


def _device(ring: Ring, offset: int):
    """The place along the ring of the device `offset` places further."""
    return (lax.axis_index(ring.axis) + offset) % lax.axis_size(ring.axis)


def _cut(x, names: Names, region: dict) -> jax.Array:
    for name, (start, size) in region.items():
        if name in names:
            x = lax.dynamic_slice_in_dim(x, start, size, names.index(name))
    return x


def local_product(a_names: Names, a, b_names: Names, b, names: Names) -> jax.Array:
    """A product of what is here, summed over the names that the result lacks, in float32 at least."""
    letter = {name: chr(ord("a") + i) for i, name in enumerate(dict.fromkeys((*a_names, *b_names)))}
    text = ",".join("".join(letter[n] for n in side) for side in (a_names, b_names))
    dtype = a.dtype if a.dtype.itemsize >= 4 else jnp.float32
    return jnp.einsum(f"{text}->{''.join(letter[n] for n in names)}", a, b, preferred_element_type=dtype)


def _join(parts: list, names: Names, rows: str) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, names.index(rows))
