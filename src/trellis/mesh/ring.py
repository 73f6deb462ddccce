"""Rings: slices pass from device to device while each device multiplies what it has.

A ring is an all-gather or a reduce-scatter, taken apart so that products run between its steps.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from trellis.choices import is_count
from trellis.mesh.parts import part_of, with_part
from trellis.notation import NotationError


class RingError(NotationError):
    """Sizes, chunks or mesh axes that a ring cannot divide or does not have."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """How slices travel along a mesh axis.

    Attributes:
        axis: the mesh axis.
        both_ways: slices travel up and down the axis, each to the nearer half of the devices, so that links work in
            both directions. A ring then takes half the steps, with the same bytes in all and products as large.
        chunks: how many parts each slice travels in. With more chunks, products start sooner but are smaller. Sums that
            travel gain from two: while one is on its way, the product of the other runs.
    """

    axis: str
    both_ways: bool = False
    chunks: int = 1

    def __post_init__(self):
        if not is_count(self.chunks):
            raise RingError(
                f"a slice must travel in at least one chunk, got chunks={self.chunks}, in Ring('{self.axis}'): pass 1 "
                "or more"
            )

    def hops(self, size: int, part: int) -> dict[int, int]:
        """How far a part travels in each direction (1 is up, to the next device) along an axis of `size` devices.

        If `size` is even, the farthest device is equally far either way: parts take turns.
        """
        if not self.both_ways:
            return {1: size - 1, -1: 0}
        up = 1 if part % 2 == 0 else -1
        return {up: size // 2, -up: (size - 1) // 2}


Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Moved:
    """What travels.

    Attributes:
        name: the dimension that is whole in a product, one slice of it at a time.
        size: the size of one slice.
        text: the type of what travels, for the ledger.
    """

    name: str
    size: int
    text: str


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
    """Products of a gathered `x` with each of `others`, computed from the slices as they pass.

    Args:
        moved: a name of `x`. Where it is also in `others` it is summed slice by slice, else it is whole in the result.
        names: those of `x`.
        others: names and array, whole in `moved.name`.
        results: the names of each product.
        dtypes: the dtype of each product; sums over slices are in float32 at least.
        keep: whether the whole `x` is returned too, last. Otherwise it never is whole.
    """
    found = [_Result(ring, moved, *result) for result in zip(results, dtypes, strict=True)]
    passed = _Result(ring, moved, names, x.dtype)
    for offset, part, piece in _passing(ring, moved, names, x):
        for (other_names, other), result in zip(others, found, strict=True):
            mine = _cut(ring, moved, other_names, other, offset, part)
            result.add(offset, part, local_product(names, piece, other_names, mine, result.names))
        if keep:
            passed.add(offset, part, piece)
    return [result.whole() for result in (*found, *([passed] if keep else []))]


def scatter_products(
    ring: Ring,
    moved: Moved,
    names: Names,
    pairs: Sequence[tuple[Names, jax.Array, Names, jax.Array]],
    dtype,
    *,
    plus: jax.Array | None = None,
) -> jax.Array:
    """A device's slice of the sum of products over all devices: the partial sums travel, and each device adds its own.

    Args:
        moved: the name of the result that ends sliced.
        names: those of the result.
        pairs: factors of the products that are added up, whole in `moved.name` where they have it.
        dtype: of the result and of what travels; each addition is in float32 at least.
        plus: another partial sum, with `names`, whole in `moved.name`.
    """
    size = lax.axis_size(ring.axis)
    ways = [(by, part, hops) for part in range(ring.chunks) for by, hops in ring.hops(size, part).items() if hops]

    def own(offset: int, part: int, waits_for: Sequence = ()):
        """This device's share of what goes to the device `offset` places away, and sums that it waits for."""
        (names_of_a, first, *rest), *others = pairs
        if waits_for:
            first, *waits_for = lax.optimization_barrier((first, *waits_for))
        factors = ((names_of_a, first, *rest), *others)
        cut = lambda names, x: _cut(ring, moved, names, x, offset, part)
        shares = [local_product(a, cut(a, x), b, cut(b, y), names) for a, x, b, y in factors]
        return _added([*shares, *([] if plus is None else [cut(names, plus)]), *waits_for])

    # A product that waits for a sum adds it as it is computed: no cost, if another product can run in the meantime.
    busy = ring.both_ways or ring.chunks > 1
    sums: dict[tuple[int, int], jax.Array] = {}
    for distance in range(max(hops for *_, hops in ways), 0, -1):
        # Sums that begin here come before those that wait.
        for by, part, hops in sorted(ways, key=lambda way: distance < way[-1]):
            if distance <= hops:
                arrived = [_pass(ring, moved, sums[by, part], by)] if distance < hops else []
                waits_for, rest = (arrived, []) if busy else ([], arrived)
                sums[by, part] = _added([own(by * distance, part, waits_for), *rest]).astype(dtype)
    last = _Result(ring, moved, names, dtype, sliced=True)
    for part in range(ring.chunks):
        mine = sorted((hops, by) for by, of, hops in ways if of == part)
        *near, far = [_pass(ring, moved, sums[by, part], by) for _, by in mine]
        waits_for, rest = (near, [far]) if ring.chunks > 1 else ([], [*near, far])
        last.add(0, part, _added([own(0, part, waits_for), *rest]))
    return last.whole()


def _added(terms: list) -> jax.Array:
    """The sum, in the first one's dtype."""
    return functools.reduce(lambda total, x: total + x.astype(total.dtype), terms)


class _Result:
    """One product, as its slices and parts come in: placed where they belong, or added up if their name is summed."""

    def __init__(self, ring: Ring, moved: Moved, names: Names, dtype, *, sliced: bool = False):
        self.ring, self.moved, self.names, self.dtype, self.sliced = ring, moved, names, dtype, sliced
        self.held = None

    def add(self, offset: int, part: int, product) -> None:
        if self.moved.name not in self.names:
            self.held = product if self.held is None else self.held + product
            return
        dim, product = self.names.index(self.moved.name), product.astype(self.dtype)
        start, size = _place(self.ring, self.moved, offset, part)
        if self.sliced:
            start = part * size
        if self.held is None:
            count = self.ring.chunks * (1 if self.sliced else lax.axis_size(self.ring.axis))
            if count == 1:
                self.held = product
                return
            shape = [size * count if i == dim else n for i, n in enumerate(product.shape)]
            # Every element gets written: writing zeros before that would cost as much as a product.
            self.held = lax.empty(tuple(shape), self.dtype)
        self.held = with_part(self.held, product, start, dim)

    def whole(self) -> jax.Array:
        return self.held.astype(self.dtype)


def _passing(ring: Ring, moved: Moved, names: Names, x) -> Iterator[tuple[int, int, jax.Array]]:
    """Every device's parts of `x` as they come by: whose it is (in places from here), which part, and the part."""
    dim, size = names.index(moved.name), moved.size // ring.chunks
    parts = [lax.slice_in_dim(x, p * size, (p + 1) * size, axis=dim) for p in range(ring.chunks)]
    hops = [ring.hops(lax.axis_size(ring.axis), part) for part in range(ring.chunks)]
    here = {(by, part): piece for part, piece in enumerate(parts) for by in hops[part]}
    step = 0
    while here:
        # What the next step needs leaves before this step's products.
        coming = {
            (by, part): _pass(ring, moved, piece, by) for (by, part), piece in here.items() if step < hops[part][by]
        }
        for (by, part), piece in here.items():
            if step or by == 1:  # this device's own parts came neither way: once
                yield -by * step, part, piece
        here, step = coming, step + 1


def _pass(ring: Ring, moved: Moved, x, by: int):
    size = lax.axis_size(ring.axis)
    # The ledger reads the names off this scope.
    with jax.named_scope(f"ring[{moved.text} -> {moved.text}]"):
        return lax.ppermute(x, ring.axis, [(i, (i + by) % size) for i in range(size)])


def _place(ring: Ring, moved: Moved, offset: int, part: int):
    """Start and length of a part of the slice of the device `offset` places further, where `moved.name` is whole."""
    owner = (lax.axis_index(ring.axis) + offset) % lax.axis_size(ring.axis)
    size = moved.size // ring.chunks
    return owner * moved.size + part * size, size


def _cut(ring: Ring, moved: Moved, names: Names, x, offset: int, part: int) -> jax.Array:
    if moved.name not in names:
        return x
    return part_of(x, *_place(ring, moved, offset, part), names.index(moved.name))


def local_product(a_names: Names, a, b_names: Names, b, names: Names) -> jax.Array:
    """A product of what is here, summed over the names that the result lacks, in 32 bits at least."""
    letter = {name: chr(ord("a") + i) for i, name in enumerate(dict.fromkeys((*a_names, *b_names)))}
    text = ",".join("".join(letter[n] for n in side) for side in (a_names, b_names))
    kind = jnp.result_type(a, b)
    wide = jnp.int32 if jnp.issubdtype(kind, jnp.integer) else jnp.float32  # which holds whole numbers up to 2**24
    dtype = kind if kind.itemsize >= 4 else wide
    return jnp.einsum(f"{text}->{''.join(letter[n] for n in names)}", a, b, preferred_element_type=dtype)
