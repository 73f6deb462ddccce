"""Rotary position embeddings (Su et al., 2021, arXiv:2104.09864), with linear, Llama 3's and YaRN scaling."""

import dataclasses
import math
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from trellis.choices import check_choices
from trellis.errors import UserError
from trellis.mesh.layout import current_layout
from trellis.named import Axis, NamedArray, NamesError, cos, einsum, multiply, outer, sin
from trellis.named.arguments import number_of
from trellis.named.backend import swaps_by_product
from trellis.named.operand import operand
from trellis.named.placing import move, refuse_slices


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:  # so that NaN is refused, too
            raise UserError(f"`{name}` must be positive.", seen=f"{name}={value}", where=name, fix="use more than 0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions divided by a factor (Chen et al., 2023, arXiv:2306.15595)."""

    kind: Literal["linear"] = "linear"
    factor: float
    """How many times longer the context is than in training. Set it to the new length over the old one."""

    def __post_init__(self):
        check_choices(self)
        _check_positive(factor=self.factor)

    magnitude = 1.0

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies divided by a factor, high ones kept, a smooth step between (Llama 3.1's model card)."""

    kind: Literal["llama3"] = "llama3"
    factor: float
    """How many times longer the context is than in training. Set it to the new length over the old one."""
    low_freq_factor: float
    """Waves longer than original_context / low_freq_factor are stretched fully. Leave it at 1, as in released
    models."""
    high_freq_factor: float
    """Waves shorter than original_context / high_freq_factor are kept. Leave it at 4, as in released models."""
    original_context: int
    """Positions in training. Set it to the length that the model was first trained with."""

    def __post_init__(self):
        check_choices(self)
        _check_positive(
            factor=self.factor, low_freq_factor=self.low_freq_factor, original_context=self.original_context
        )
        if not self.high_freq_factor > self.low_freq_factor:
            raise UserError(
                "`high_freq_factor` must be greater than `low_freq_factor`.",
                seen=f"low_freq_factor={self.low_freq_factor}, high_freq_factor={self.high_freq_factor}",
                where="high_freq_factor",
                fix=f"use more than {self.low_freq_factor}, as in {4 * self.low_freq_factor}",
            )

    magnitude = 1.0

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_context * frequencies / (2 * math.pi)
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return (1 - smooth) * frequencies / self.factor + smooth * frequencies


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Low frequencies divided by a factor, high ones kept, a ramp over those between, and larger scores (YaRN, Peng et
    al., 2023, arXiv:2309.00071)."""

    kind: Literal["yarn"] = "yarn"
    factor: float
    """How many times longer the context is than in training. Set it to the new length over the old one."""
    beta_fast: float = 32.0
    """Waves that turn more often than this in the original context are kept. Leave it at 32, as in released models."""
    beta_slow: float = 1.0
    """Waves that turn less often than this in it are stretched fully. Leave it at 1, as in released models."""
    original_context: int
    """Positions in training. Set it to the length that the model was first trained with."""
    truncate: bool = True
    """Whether the ramp begins and ends at whole frequencies. Set it to the value of an imported model."""
    mscale: float = 1.0
    """How fast queries and keys grow with the log of the factor. Set it to the value of an imported model."""
    mscale_all_dim: float = 0.0
    """The part of this growth that a model leaves to the scale of its scores. Set it to the value of an imported
    model."""

    def __post_init__(self):
        check_choices(self)
        _check_positive(factor=self.factor, beta_slow=self.beta_slow, original_context=self.original_context)
        if not self.beta_fast > self.beta_slow:
            raise UserError(
                "`beta_fast` must be greater than `beta_slow`.",
                seen=f"beta_fast={self.beta_fast}, beta_slow={self.beta_slow}",
                where="beta_fast",
                fix=f"use more than {self.beta_slow}, as in {32 * self.beta_slow}",
            )

    def growth(self, rate: float) -> float:
        """A factor that grows with the log of the context's: `0.1 rate log(factor) + 1`.

        >>> round(YarnScaling(factor=32.0, original_context=4096).growth(1.0), 4)
        1.3466
        """
        return 0.1 * rate * math.log(max(self.factor, 1.0)) + 1.0

    @property
    def magnitude(self) -> float:
        """A factor on cosines and sines; scores get its square."""
        return self.growth(self.mscale) / self.growth(self.mscale_all_dim)

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        count = len(frequencies)
        # A single frequency is the highest, which is kept.
        step = math.log(frequencies[0] / frequencies[-1]) / (count - 1) if count > 1 else math.inf
        # The place of the frequency that turns this often in the original context.
        place = lambda turns: math.log(self.original_context * frequencies[0] / (2 * math.pi * turns)) / step
        low, high = place(self.beta_fast), place(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * count - 1)
        ramp = np.clip((np.arange(count) - low) / (high - low if high != low else 1e-3), 0.0, 1.0)
        return frequencies * (1 - ramp) + frequencies / self.factor * ramp


Scaling = LinearScaling | Llama3Scaling | YarnScaling

QUERY = ("batch", "pos", "heads", "head_dim")


def frequencies(size: int, theta: float, scaling: Scaling | None = None) -> np.ndarray:
    """Radians a position, `f64["size/2"]`: theta ** (-2i / size), scaled.

    Raises:
        NamesError: the size is not even, or theta not above 0.
    """
    if size % 2:
        raise NamesError(
            f"rotary embeddings need an even number of elements, since they rotate pairs, got {size}, in frequencies: "
            "use an even head_dim, or rotate fewer with pairs"
        )
    if not theta > 0:
        raise NamesError(f"theta must be more than 0, got theta={theta}, in frequencies: use 1e4, or more")
    plain = theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    return plain if scaling is None or not size else scaling(plain)


def rotary_tables(
    positions: NamedArray, head_dim: Axis, theta: float, scaling: Scaling | None = None, *, pairs: int | None = None
):
    """Cosines and sines, `f32["... pos head_dim"]` each.

    Computed once for all layers, and placed once where queries and keys are used.

    Names: those of `positions`, then that of `head_dim`.
    Gradient: none.
    Moves: nothing, if positions are sliced as queries are.

    Args:
        positions: `i32["batch pos"]` or `i32["pos"]`.
        head_dim: the dimension to rotate; its size is even.
        theta: the base of the frequencies.
        scaling: for contexts longer than in training.
        pairs: rotate neighbours, and only in the first so many elements, as GPT-J does; None rotates
            an element of the first half with its counterpart in the second.

    Raises:
        NamesError: as for `frequencies`, or `pairs` is more than `head_dim`.
    """
    theta = number_of(
        theta, "theta", "rotary_tables", "pass a Python number, or scale the positions by the learned value"
    )
    if pairs is not None and not 0 <= pairs <= head_dim.size:
        raise NamesError(
            f"no more elements can be rotated than there are, got pairs={pairs} of {head_dim}, in rotary_tables: use "
            f"{head_dim.size} or fewer"
        )
    if pairs is None:
        rates = np.tile(frequencies(head_dim.size, theta, scaling), 2)
    else:
        rates = np.zeros(head_dim.size)  # no turn is an angle of 0
        rates[:pairs] = np.repeat(frequencies(pairs, theta, scaling), 2)
    in_place = lambda numbers: NamedArray(jnp.asarray(numbers, jnp.float32), (head_dim.name,))
    angles = _for_use(outer(multiply, positions.astype(jnp.float32), in_place(rates)))
    grown: Any = 1.0 if scaling is None else scaling.magnitude
    if grown == 1:
        return cos(angles), sin(angles)
    if (rates == 0).any():  # what is not rotated stays as it is
        grown = in_place(np.where(rates == 0, 1.0, grown))
    return cos(angles) * grown, sin(angles) * grown


def _for_use(angles: NamedArray) -> NamedArray:
    """Moves angles to where they meet queries: if a mesh axis slices heads, positions are whole along it."""
    layout = current_layout()
    if layout is None:
        return angles
    used = dict(zip(QUERY, layout.assign(QUERY), strict=True))
    return move(angles, tuple(used.get(name, ()) for name in angles.names), frozenset())


def rotate(x: NamedArray, tables, head_dim: str = "head_dim", *, pairs: bool = False) -> NamedArray:
    """Rotates pairs `(i, i + head_dim/2)` of a query or key by its position's angles; with `pairs`, `(2i, 2i + 1)`.

    On TPUs the exchange within pairs is a product with a signed permutation,
    exact in every dtype: slicing a dimension of 64 or 128 lanes is slow there.

    Names: those of `x`.
    Gradient: rotated back; nothing moves.
    Moves: nothing.

    Args:
        x: queries or keys, `"batch pos heads head_dim"`.
        tables: cosines and sines, from `rotary_tables`.
        head_dim: the dimension to rotate.
        pairs: whether pairs are neighbours; the tables are then made with `pairs`, too.

    Raises:
        NamesError: `head_dim` is sliced in a manual program.
    """
    x = operand(x, "rotate", copies=False)
    refuse_slices((x, *tables), (head_dim,), "rotate")  # in a manual program a device has its own slice's pairs only
    cos, sin = (t.astype(x.dtype) for t in tables)
    return x * cos + _turned(x, head_dim, pairs) * sin


def _turned(x: NamedArray, name: str, pairs: bool) -> NamedArray:
    """`(-second, first)` of each pair, in the places of the pair; 0 for a last element that has no neighbour."""
    size = x.shape[name]
    paired = size // 2 * 2
    if swaps_by_product(x.array):
        first = np.arange(0, paired, 2) if pairs else np.arange(size // 2)
        second = first + (1 if pairs else size // 2)
        swap = np.zeros((size, size), np.float32)
        swap[second, first] = -1
        swap[first, second] = 1
        matrix = NamedArray(jnp.asarray(swap, x.dtype), (name, "turned"))
        names, out = (" ".join(n if n != name else own for n in x.names) for own in (name, "turned"))
        return einsum(f"{names}, {name} turned -> {out}", x, matrix).rename(turned=name)
    axis = x.index(name)
    if pairs:
        before, after = x.array.shape[:axis], x.array.shape[axis + 1 :]
        array = x.array if paired == size else lax.slice_in_dim(x.array, 0, paired, axis=axis)
        split = array.reshape(*before, paired // 2, 2, *after)
        turned = (jnp.flip(split, axis + 1) * _signs(split, axis + 1)).reshape(array.shape)
        if paired < size:
            last = lax.slice_in_dim(x.array, paired, size, axis=axis)
            turned = jnp.concatenate([turned, jnp.zeros_like(last)], axis)
        return x.with_array(turned)
    first, second = jnp.split(x.array, 2, axis=axis)
    return x.with_array(jnp.concatenate([-second, first], axis=axis))


def _signs(x, axis: int):
    """-1 for the first of each pair, 1 for the second."""
    return jnp.array([-1, 1], x.dtype).reshape([2 if i == axis else 1 for i in range(x.ndim)])
