"""Numbers of eight or four bits in blocks, each block with a scale: MXFP8 and NVFP4.

MXFP8 is e4m3 in blocks of 32, whose scale is a power of two in eight bits (e8m0). NVFP4 is e2m1 in blocks of 16, whose
scale is e4m3, beside one float32 scale of the whole array. Scales are an array of their own: beside
`f8_e4m3fn[layers embed mlp]` lies `f8_e8m0fnu[layers embed mlp_block]`, sliced as the numbers are. A block is on one
device, so nothing moves and the numbers do not depend on the mesh.

Sources: Rouhani et al., 2023, arXiv:2310.10537, and the OCP Microscaling Formats specification 1.0. Powers of two are
rounded up, so that no number is clipped (Mishra et al., 2025, arXiv:2506.08027). NVFP4: NVIDIA, 2025, arXiv:2509.25149.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from trellis.named.array import NamedArray, is_named
from trellis.named.backend import on_accelerator
from trellis.named.hadamard import SIDE, transformed
from trellis.named.rounding import at_random, drawn_for, exponent_of, nearest, power_of_two
from trellis.notation import spec_of
from trellis.notation.state import sharding_on, state_of


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """A format of numbers in blocks.

    Attributes:
        element: the type of a number.
        scale: the type of a block's scale.
        block: how many numbers share one, if an axis has as many.
    """

    element: Any
    scale: Any
    block: int

    @property
    def limit(self) -> float:
        """The largest number."""
        return float(jnp.finfo(self.element).max)

    @property
    def has_whole(self) -> bool:
        """Whether the array has a scale, too, which brings those of its blocks into their range."""
        return self.scale != jnp.float8_e8m0fnu


MXFP8 = Format(jnp.float8_e4m3fn, jnp.float8_e8m0fnu, 32)
NVFP4 = Format(jnp.float4_e2m1fn, jnp.float8_e4m3fn, 16)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=[])
@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """An array in blocks.

    Attributes:
        values: the numbers in eight bits, in the array's shape.
        scales: a power of two for each block; a dimension in blocks has one for each of them.
    """

    values: Any
    scales: Any

    def opened(self, dtype=jnp.float32) -> Any:
        """The array that it stands for."""
        array = opened(*(x.array if is_named(x) else x for x in (self.values, self.scales)), dtype)
        return self.values.with_array(array) if is_named(self.values) else array


def block_of(length: int, most: int = MXFP8.block) -> int:
    """How many numbers share a scale along an axis of this length: 32, or the largest divisor below.

    >>> block_of(4096), block_of(48), block_of(20)
    (32, 24, 20)
    """
    return max(n for n in range(1, min(most, length) + 1) if length % n == 0)


def cut_by(array: jax.Array, dim: int, form: Format = MXFP8) -> int:
    """How many slices a dimension has if they would cut blocks; 0 if blocks are whole."""
    state = state_of(array)
    if state.mode != "explicit":
        return 0
    sizes = jax.typeof(array).sharding.mesh.shape
    ways = math.prod(sizes[axis] for axis in state.axes[dim])
    return ways if array.shape[dim] // block_of(array.shape[dim], form.block) % ways else 0


def in_blocks(x: Any, dim: int, *, key: jax.Array | None = None, squares: bool = False) -> Blocks:
    """An array, named or plain, in blocks along a dimension.

    Args:
        x: of floats. A block with a number that is not finite has a scale that is not.
        dim: which dimension. A device's slice of it holds whole blocks.
        key: rounds at random, so that the mean is the number; None rounds to the nearest. What is drawn for an element
            depends on its place in the whole array, so it is the same on every mesh.
        squares: `x` holds squares of what is to be kept. The roots are kept, which have twice the range, and rounded so
            that the mean of their squares is `x`; only zero becomes zero. Needs a key. With the key of another array
            (without `squares`), other bits of the same draw are used: a compiler draws once for both.
    """
    array = x.array if is_named(x) else x
    chance = None
    if key is not None:
        bits = drawn_for(array, key)
        chance = (bits & 0xFFFF if squares else bits >> 16).astype(jnp.float32) / 2.0**16
    values, scales, _ = blocked(array, (dim,), chance=chance, squares=squares)
    return (
        Blocks(x.with_array(values), named_scales(scales, x.names, (dim,))) if is_named(x) else Blocks(values, scales)
    )


def zeros_in_blocks(x: Any, dim: int) -> Blocks:
    """What `in_blocks` makes of zeros like an array, named or plain, without rounding them.

    A compiler would round these constants itself, a hundred thousand a second.
    """
    types = jax.eval_shape(lambda x: in_blocks(x, dim), x)
    return Blocks(jax.tree.map(jnp.zeros_like, types.values), jax.tree.map(jnp.ones_like, types.scales))


def named_scales(scales: jax.Array, names: tuple[str, ...], dims: tuple[int, ...]) -> NamedArray:
    """Scales by name: `mlp_block` if blocks lie along `mlp`."""
    return NamedArray(scales, tuple(f"{n}_block" if i in dims else n for i, n in enumerate(names)))


def blocked(
    array: jax.Array,
    dims: tuple[int, ...],
    form: Format = MXFP8,
    *,
    chance: jax.Array | None = None,
    squares: bool = False,
    hadamard: bool = False,
    widened: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """A plain array in blocks along dimensions; a block's numbers share a scale.

    Args:
        array: of floats.
        dims: the dimensions.
        form: what the numbers are.
        chance: for each number one drawn from 0 to 1, by which it is rounded at random; None rounds to the nearest.
        squares: as in `in_blocks`.
        hadamard: whether blocks of 16, along one dimension, are transformed first (`trellis.named.hadamard`).
        widened: whether the values are made wider again where they are, which XLA's GPU compiler takes for no rounding.

    Returns:
        The values, the scales of the blocks, and where the format has one the scale of the whole array.
    """
    sizes = {dim: block_of(array.shape[dim], form.block) for dim in dims}
    cut = _cut(array, sizes)
    within = tuple(dim + n + 1 for n, dim in enumerate(sorted(dims)))
    mixes = hadamard and set(sizes.values()) == {SIDE}
    wide = transformed(cut, *within) if mixes else cut.astype(jnp.float32)
    wide = jnp.sqrt(wide) if squares else wide
    largest, whole = jnp.max(jnp.abs(wide), axis=within, keepdims=True), None
    # Each number is divided once: a compiler makes one division of two.
    if form.has_whole:
        most = jnp.max(largest) * (1.0 / (form.limit * float(jnp.finfo(form.scale).max)))
        whole = jnp.where(most > 0, most, jnp.where(most == 0, 1.0, jnp.nan))
        scales = largest / (whole * form.limit)
        if chance is not None:  # up, so that none is clipped: the mean of what is clipped is less than the number
            most = float(jnp.finfo(form.scale).max)
            scales = jnp.minimum(at_random(scales, form.scale, jnp.zeros_like(scales)), most)
        scales = scales.astype(form.scale).astype(jnp.float32)  # 0 for what is too small
        unit = jnp.where(scales == 0, 1.0, scales) * whole
    else:
        unit = scales = _power_of(largest, form)
    scaled = jnp.clip(wide / unit, -form.limit, form.limit)
    if chance is not None:
        scaled = at_random(scaled, form.element, _cut(chance, sizes), squares=squares)
    elif widened or (form is NVFP4 and not on_accelerator(array)):
        scaled = nearest(scaled, form.element)
    return _whole(scaled.astype(form.element), within), jnp.squeeze(scales, within).astype(form.scale), whole


def opened(values: jax.Array, scales: jax.Array, dtype=jnp.float32) -> jax.Array:
    """The plain array that values and scales stand for."""
    blocks = {d: n // m for d, (n, m) in enumerate(zip(values.shape, scales.shape, strict=True)) if n != m}
    within = tuple(dim + n + 1 for n, dim in enumerate(blocks))
    wide = _cut(values, blocks).astype(jnp.float32) * jnp.expand_dims(scales.astype(jnp.float32), within)
    return _whole(wide, within).astype(dtype)


def _power_of(largest: jax.Array, form: Format) -> jax.Array:
    """The least power of two that brings numbers within the type's range; 1 for zeros."""
    exponent = jnp.clip(exponent_of(largest / form.limit, up=True), -126, 127)
    power = power_of_two(jnp.where(largest > 0, exponent, 0))
    return jnp.where(jnp.isfinite(largest), power, jnp.nan)


def _cut(array: jax.Array, blocks: dict[int, int]) -> jax.Array:
    """Splits dimensions in two: blocks, and places in a block. Slices stay with the blocks."""
    for dim in sorted(blocks, reverse=True):
        shape = (*array.shape[:dim], array.shape[dim] // blocks[dim], blocks[dim], *array.shape[dim + 1 :])
        array = _reshaped(array, shape, lambda axes, d=dim: (*axes[: d + 1], (), *axes[d + 1 :]))
    return array


def _whole(array: jax.Array, within: tuple[int, ...]) -> jax.Array:
    """Undoes `_cut`: merges dimensions of places with the blocks before them."""
    for dim in sorted(within, reverse=True):
        shape = (*array.shape[: dim - 1], array.shape[dim - 1] * array.shape[dim], *array.shape[dim + 1 :])
        array = _reshaped(array, shape, lambda axes, d=dim: (*axes[:d], *axes[d + 1 :]))
    return array


def _reshaped(array: jax.Array, shape: tuple[int, ...], to) -> jax.Array:
    state = state_of(array)
    if state.mode != "explicit":
        return array.reshape(shape)
    return lax.reshape(array, shape, out_sharding=sharding_on(array, spec_of(to(state.axes))))
