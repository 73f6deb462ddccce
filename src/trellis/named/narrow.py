"""Narrow products: both factors in eight or four bits, with one scale or several, the sum in 32.

`Narrow` marks a weight. With a marked weight, `einsum`, `dot` and `dot_each` round both factors where they are before
they are moved, so gathers are in eight bits, and round the gradient of the result once for its products. A scale is
current: the largest element of the whole array, over all devices, becomes the largest number of the type, so the result
does not depend on the mesh.

fp8 takes e4m3 forward and e5m2 for gradients (Micikevicius et al., 2022, arXiv:2209.05433). int8 takes symmetric whole
numbers from -127 to 127 forward and for the gradient of the activation; the weight's gradient, a sum over all tokens in
which rounding errors add up, takes the result's gradient unrounded (SwitchBack: Wortsman et al., 2023,
arXiv:2304.13013). mxfp8 takes e4m3 for all three, with a scale for each tile of 32 by 32 numbers
(`trellis.named.blocks`), so that one rounding serves the products over either side of a tile.

nvfp4 takes e2m1 for all three (NVIDIA, 2025, arXiv:2509.25149): weights in tiles of 16 by 16; activations and gradients
in rows of 16 along the dimension that a product sums, so each is rounded twice, once for each product it is a factor
of. The factors of a weight's gradient are transformed first (`trellis.named.hadamard`), and gradients are rounded at
random if the mark has a key.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.linear import linear
from trellis.mesh.reshard import place
from trellis.named.array import NamedArray
from trellis.named.axis import NamesError
from trellis.named.backend import plain_product, rounded_together
from trellis.named.blocks import MXFP8, NVFP4, Format, block_of, blocked, cut_by, opened
from trellis.named.rounding import bytes_for, nearest
from trellis.named.scaled import scaled_product
from trellis.notation import spec_of, typeof
from trellis.notation.state import state_of

Kind = Literal["fp8", "int8", "mxfp8", "nvfp4"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Types:
    forward: Any
    gradient: Any
    blocks: Format | None = None
    tiled: bool = True  # in blocks, whether activations and gradients have tiles, as weights do
    whole_sums: bool = False  # whether a weight's gradient takes the result's unrounded

    @property
    def in_blocks(self) -> bool:
        return self.blocks is not None


TYPES = {
    "fp8": _Types(jnp.float8_e4m3fn, jnp.float8_e5m2),
    "int8": _Types(jnp.int8, jnp.int8, whole_sums=True),
    "mxfp8": _Types(MXFP8.element, MXFP8.element, MXFP8),
    "nvfp4": _Types(NVFP4.element, NVFP4.element, NVFP4, tiled=False),
}


class Mark(NamedTuple):
    """The narrow product that two operands ask for.

    Attributes:
        kind: that of the numbers.
        at: which operand is the weight.
        key: for rounding gradients at random, or None.
        largest: `f32["factor"]`, from which scales are made, or None.
    """

    kind: Kind
    at: int
    key: jax.Array | None
    largest: jax.Array | None = None


class Rounded(NamedTuple):
    """A plain array in narrow numbers.

    Attributes:
        values: the numbers.
        scale: one, or one for each block.
        whole: another scale, of the whole array, or None.
        largest: the array's largest element if its scale was made from another, or None.
    """

    values: jax.Array
    scale: jax.Array
    whole: jax.Array | None = None
    largest: jax.Array | None = None


# The three arrays that are rounded in a narrow product and its gradients, in the order of their largest elements.
FACTORS = ("activation", "weight", "gradient")


class _OnlyFactor(NamesError, AttributeError):
    """A narrow weight was asked for what a named array has; `hasattr` is false for it."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "key", "largest"], meta_fields=["kind"])
@dataclasses.dataclass(frozen=True, slots=True)
class Narrow:
    """A weight whose products are computed in eight or four bits: a factor of `einsum`, `dot` and `dot_each`.

    >>> x, w = tr.ones({"batch": 2, "embed": 4}), tr.full({"embed": 4, "mlp": 3}, 0.5)
    >>> tr.typeof(tr.dot(x, tr.Narrow(w, "fp8"), over="embed"))
    'f32[batch=2 mlp=3]'

    Attributes:
        weight: a named array of floats.
        kind: "fp8", "int8", "mxfp8" or "nvfp4".
        key: for nvfp4, a random key with which gradients are rounded without bias; None rounds them to the nearest
            number. A weight of several layers has named keys, one for each (`tr.random.split`).
        largest: for fp8 and int8, the largest elements from which scales are made: `f32["factor=3"]`, of the
            activation, the weight and the result's gradient; zero stands for the current largest. Larger elements are
            clipped. Its gradient is not a derivative but the largest elements that were met, for the next step's
            scales; Transformer Engine calls this delayed scaling. Of several products with one weight JAX adds them up.
            None makes scales from the current largest.
    """

    weight: NamedArray
    kind: Kind
    key: Any = None
    largest: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(NamedArray, name):
            raise AttributeError(f"a narrow weight has no {name!r}")
        raise _OnlyFactor(
            f"a narrow weight can only be a factor of einsum, dot or dot_each, got .{name} of {typeof(self.weight)}, "
            f"whose products are {self.kind}: use its `.weight`, or do not mark it as narrow"
        )


def marked(operands: tuple, what: str) -> tuple[tuple[NamedArray, ...], Mark | None]:
    """The operands of a product without their marks, and the narrow product that they ask for.

    Raises:
        NamesError: a narrow weight among fewer or more than two operands, or two that differ.
    """
    marks = {i: x for i, x in enumerate(operands) if isinstance(x, Narrow)}
    if not marks:
        return operands, None
    kinds = {x.kind for x in marks.values()}
    plain = tuple(x.weight if isinstance(x, Narrow) else x for x in operands)
    if unknown := [kind for kind in kinds if kind not in TYPES]:
        raise NamesError(
            f"a narrow product must be in one of {', '.join(TYPES)}, got '{unknown[0]}', in {what}: write one of these"
        )
    if wrong := [x for x in plain if hasattr(x, "dtype") and not jnp.issubdtype(x.dtype, jnp.floating)]:
        raise NamesError(f"a narrow product needs floats, got {typeof(wrong[0])}, in {what}: cast it with .astype")
    if len(kinds) > 1 or len(operands) != 2:
        raise NamesError(
            f"a narrow product must have two factors of one kind, got {', '.join(map(typeof, plain))} of kind "
            f"{' and '.join(sorted(kinds))}, in {what}: multiply two at a time"
        )
    if any(isinstance(x, NamedArray) and not x.size for x in plain):
        return plain, None  # an empty array has no largest element, and the product has none of its numbers
    at, mark = max(marks.items())
    return plain, Mark(mark.kind, at, _one_key(mark, what), _three(mark, what))


def _three(mark: Narrow, what: str) -> jax.Array | None:
    if mark.largest is None:
        return None
    largest = mark.largest.array if isinstance(mark.largest, NamedArray) else mark.largest
    if TYPES[mark.kind].in_blocks or largest.shape != (len(FACTORS),) or largest.dtype != jnp.float32:
        raise NamesError(
            "only a product in fp8 or int8 takes largest elements, f32[3], of the activation, the weight and the "
            f"gradient, got {typeof(largest)} for a product in {mark.kind}, in {what}: leave them out, or pass three"
        )
    return largest


def _one_key(mark: Narrow, what: str) -> jax.Array | None:
    if mark.key is None:
        return None
    key = mark.key.array if isinstance(mark.key, NamedArray) else mark.key
    if mark.kind != "nvfp4":
        raise NamesError(
            f"only products in nvfp4 take a key, to round their gradients, got one for a product in {mark.kind}, in "
            f"{what}: leave it out"
        )
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.ndim:
        raise NamesError(
            f"a narrow weight must have one random key in a product, got {typeof(key)}, in {what}: make it with "
            "jax.random.key, or, for a weight of several layers, with tr.random.split along their name"
        )
    return key


def forms(array, mark: Mark, number: int, summed: tuple[int, ...], kept: tuple[int, ...]) -> tuple[Rounded, ...]:
    """A factor in narrow numbers: for the product and, if that needs another form, for the other factor's gradient.

    Args:
        array: the factor, a plain array.
        mark: which product.
        number: which of its factors.
        summed, kept: for each form, the dimension along which blocks lie, or none.
    """
    if TYPES[mark.kind].tiled or number == mark.at:
        known = None if mark.largest is None else mark.largest[int(number == mark.at)]
        return (rounded(array, mark.kind, (*summed, *kept), known=known),)
    return rounded_together(
        rounded(array, mark.kind, summed),
        rounded(array, mark.kind, kept, hadamard=bool(kept)),
    )


def rounded(
    array,
    kind: Kind,
    dims: tuple[int, ...],
    *,
    gradient: bool = False,
    known=None,
    chance=None,
    hadamard: bool = False,
    widened: bool = False,
) -> Rounded:
    """A plain array in narrow numbers, and the scale or scales by which they are multiplied.

    The array's gradient does not pass through here. The type's largest number stands for the largest of an array or a
    tile. If an element is not finite, neither is its scale, nor what is computed from it. A scale that is made from a
    known element may hide it instead, which `largest` then shows.

    Args:
        array: what is rounded.
        kind: to which numbers.
        dims: the dimensions along which blocks lie, where a kind has them.
        gradient: whether it is a gradient.
        known: the element from which its one scale is made, unless zero; None for its largest.
        chance: rounds numbers in blocks at random, as `blocked` takes it.
        hadamard: whether blocks are transformed, as `blocked` takes it.
        widened: whether the numbers are made wider again where they are, as `blocked` takes it.

    Raises:
        NamesError: slices would cut blocks.
    """
    fixed = _settled(array)
    if (form := TYPES[kind].blocks) is None:
        wide, largest = fixed.astype(jnp.float32), None
        if known is not None:
            largest = _largest(wide)
            known = jnp.where(lax.stop_gradient(known) > 0, lax.stop_gradient(known), largest)
        values, scale = with_one_scale(wide, kind, gradient=gradient, known=known, widened=widened)
        return Rounded(values, _once(scale, array), largest=largest)
    of = {dim: block_of(fixed.shape[dim], form.block) for dim in dims}
    if cut := [dim for dim in of if cut_by(fixed, dim, form)]:
        raise NamesError(
            f"numbers that share a scale must be on one device, got {cut_by(fixed, cut[0], form)} slices of dimension "
            f"{cut[0]} of {typeof(fixed)}, in tiles of {of[cut[0]]}, in a product in {kind}: slice it over fewer "
            "devices, or use fp8"
        )
    values, scales, whole = blocked(fixed, dims, form, chance=chance, hadamard=hadamard, widened=widened)
    return Rounded(values, _once(scales, array), None if whole is None else _once(whole, array))


def _largest(wide: jax.Array) -> jax.Array:
    """The largest of float32 numbers; infinity if one is not a number, which a maximum over devices may lose.

    Their bits are compared, which without a sign are in the order of the numbers, and those of what is none come last.
    """
    largest = lax.bitcast_convert_type(jnp.max(lax.bitcast_convert_type(jnp.abs(wide), jnp.int32)), jnp.float32)
    return jnp.where(jnp.isnan(largest), jnp.inf, largest)


def with_one_scale(
    wide: jax.Array, kind: Kind, *, gradient: bool, over: tuple[str, ...] = (), known=None, widened: bool = False
):
    """Rounds float32 numbers by their largest, or a known one: narrow numbers, and the scale.

    Args:
        wide: what is rounded.
        kind: to which numbers.
        gradient: whether it is a gradient.
        over: in manual mode, the mesh axes along which other devices have more of the numbers.
        known: what the type's largest number stands for, instead of their largest.
        widened: whether the numbers are made wider again where they are, as `blocked` takes it.
    """
    dtype = TYPES[kind].gradient if gradient else TYPES[kind].forward
    whole = jnp.issubdtype(dtype, jnp.integer)
    limit = 127.0 if whole else float(jnp.finfo(dtype).max)
    largest = _largest(wide) if known is None else known
    if over:
        largest = lax.pmax(largest, over)
    # A smaller scale may be zero to a processor, and what is divided by it not finite.
    scale = jnp.where(largest > 0, jnp.maximum(largest / limit, float(jnp.finfo(jnp.float32).tiny)), 1.0)
    scaled = jnp.clip(wide / scale, -limit, limit)
    if whole:
        scaled = jnp.round(scaled)
    elif widened:
        scaled = nearest(scaled, dtype)
    return scaled.astype(dtype), scale


# A narrow product's derivative takes the rounded factors as constants: differentiated again it would wrongly be zero.
# So the scale depends on the array, in a way that costs nothing and refuses a second derivative.


@jax.custom_jvp
def _once(scale, array):
    return scale


@_once.defjvp
def _once_derivative(primals, tangents):
    return not_again(*primals), jnp.zeros_like(tangents[0])


@jax.custom_jvp
def not_again(scale, array):
    """The scale of what a first derivative makes of an array; refuses a second one."""
    return scale


@not_again.defjvp
def _refused(primals, tangents):
    raise NamesError(
        "a narrow product can only be differentiated once, got a second derivative, of a factor "
        f"{typeof(primals[1])}: use a model whose products are not narrow"
    )


def product(x, y, narrow_x, narrow_y, numbers, *, mark: Mark, dtype, spec=None) -> jax.Array:
    """`dot_general` of two plain arrays, from their narrow forms.

    Args:
        x, y: the factors, moved as for a plain product. Only their types are used, forward, and the gradient is theirs.
            Their values, and so their moves, are not part of the program.
        narrow_x, narrow_y: from `forms`, moved likewise.
        numbers: dimension numbers as `dot_general` takes them.
        mark: which product, of `x` and `y` in this order.
        dtype: of the result.
        spec: how the result is sharded, or None.

    Raises:
        NamesError: in manual mode.
    """
    if state_of(x).mode == "manual":
        raise NamesError(
            f"a narrow product needs whole arrays, whose largest elements give the scales, got slices of {typeof(x)} "
            f"and {typeof(y)} in manual mode: multiply outside of shard_map, or use plain factors"
        )
    summed, batch = (tuple(tuple(int(i) for i in dims) for dims in group) for group in numbers)
    states = (state_of(x), state_of(y))
    static = _Static(mark.kind, mark.at, (summed, batch), spec, jnp.dtype(dtype), (x.dtype, y.dtype), states)
    bits = None if mark.key is None else jax.random.key_data(mark.key)
    return _product(static, x, y, mark.largest, tuple(narrow_x), tuple(narrow_y), bits)


@dataclasses.dataclass(frozen=True, slots=True)
class _Static:
    kind: Kind
    weight: int
    numbers: tuple
    spec: Any
    dtype: Any
    dtypes: tuple
    states: tuple


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(static: _Static, x, y, largest, narrow_x, narrow_y, bits):
    return multiplied(narrow_x[0], narrow_y[0], static.numbers, static.kind, static.dtype, static.spec)


@_product.defjvp
def _derivative(static: _Static, primals, tangents):
    largest, *fixed = primals[2:]
    out = multiplied(  # no `x` and `y`: see `product`
        fixed[0][0], fixed[1][0], static.numbers, static.kind, static.dtype, static.spec
    )

    def change(fixed, moving):
        (_, narrow_x, narrow_y, _), (dx, dy, _) = fixed, moving
        dot = functools.partial(plain_product, numbers=static.numbers, dtype=static.dtype, spec=static.spec)
        return dot(dx, _opened(narrow_y[0], dx)) + dot(_opened(narrow_x[0], dy), dy)

    def gradients(fixed, gradient):
        largest, narrow_x, narrow_y, bits = fixed
        known = None if largest is None else largest[FACTORS.index("gradient")]
        of_x, of_y = _narrow_gradients(static, gradient, bits, known)
        met = None
        if largest is not None:
            met = [narrow_x[0].largest, narrow_y[0].largest][:: 1 if static.weight else -1]
            met = jnp.stack([*met, of_x.largest])
        factors = [(of_x, narrow_y[-1]), (of_y, narrow_x[-1])]
        if TYPES[static.kind].whole_sums:
            factors[static.weight] = _not_rounded(gradient, factors[static.weight][1])
        return *(_gradient(static, which, *pair) for which, pair in enumerate(factors)), met

    return out, linear(change, gradients, like=out)((largest, *fixed), tuple(tangents[:3]))


def _not_rounded(gradient, other: Rounded) -> tuple[Rounded, Rounded]:
    """The unrounded gradient of a product's result, and a narrow factor in the same type, which holds its numbers."""
    fixed = _settled(gradient)
    scale = not_again(jnp.ones((), jnp.float32), gradient)
    return Rounded(fixed, scale), other._replace(values=other.values.astype(fixed.dtype))


def _settled(array) -> jax.Array:
    """An array without its gradient, and not as copies."""
    fixed = lax.stop_gradient(array)
    state = state_of(fixed)
    return place(fixed, state.axes) if state.copied else fixed


def _narrow_gradients(static: _Static, gradient, bits, known) -> tuple[Rounded, Rounded]:
    """The gradient of a product's result, in narrow numbers, for the gradient of each factor."""
    types, ends = TYPES[static.kind], _innermost(static)
    if types.tiled:
        found = rounded(
            gradient, static.kind, tuple(end for end in ends if end is not None), gradient=True, known=known
        )
        found = once_only(found, gradient)
        return found, found
    chance = None
    if bits is not None:  # the middle of what a byte stands for
        chance = (bytes_for(gradient, jax.random.wrap_key_data(bits)).astype(jnp.float32) + 0.5) / 256
    made = []
    for which in range(2):
        end = ends[1 - which]  # the gradient of one factor sums dimensions of the other
        how = dict(gradient=True, chance=chance, hadamard=which == static.weight and end is not None)
        found = rounded(gradient, static.kind, () if end is None else (end,), **how)
        made.append(once_only(found, gradient))
    return rounded_together(*made)


def once_only(found: Rounded, array) -> Rounded:
    """What a first derivative makes of an array; refuses a second one."""
    whole = None if found.whole is None else not_again(found.whole, array)
    return found._replace(scale=not_again(found.scale, array), whole=whole)


def _innermost(static: _Static) -> tuple[int | None, int | None]:
    """The last dimension of a product's result that comes from each factor, or None if none does."""
    summed, batch = static.numbers
    free = [len(state.axes) - len(s) - len(b) for state, s, b in zip(static.states, summed, batch, strict=True)]
    ends = (len(batch[0]) + free[0], len(batch[0]) + free[0] + free[1])
    first, second = (end - 1 if count else None for end, count in zip(ends, free, strict=True))
    return first, second


def _gradient(static: _Static, which: int, narrow: Rounded, other: Rounded) -> jax.Array:
    """The gradient of one factor: the product of the result's and the other factor."""
    summed, batch = static.numbers
    ranks = [len(state.axes) for state in static.states]
    free = [[i for i in range(rank) if i not in (*summed[n], *batch[n])] for n, rank in enumerate(ranks)]
    before = len(batch[0]) + (len(free[0]) if which == 0 else 0)
    theirs = 1 - which
    over = tuple(range(before, before + len(free[theirs])))
    numbers = ((over, tuple(free[theirs])), (tuple(range(len(batch[0]))), batch[theirs]))
    # What comes out: the batch, the free dimensions of this factor, then the summed ones in the other factor's order.
    to_mine = dict(zip(summed[theirs], summed[which], strict=True))
    made = (*batch[which], *free[which], *(to_mine[i] for i in sorted(summed[theirs])))
    state = static.states[which]
    spec = None
    if state.mode == "explicit":
        spec = spec_of([state.axes[i] for i in made], state.copied, state.pending)
    out = multiplied(narrow, other, numbers, static.kind, static.dtypes[which], spec)
    return jnp.transpose(out, [made.index(i) for i in range(ranks[which])])


def multiplied(a: Rounded, b: Rounded, numbers, kind: Kind, dtype, spec=None) -> jax.Array:
    """The product of two narrow arrays, times their scales; partial sums are scaled before they are summed.

    Args:
        a, b: the factors.
        numbers: dimension numbers as `dot_general` takes them.
        kind: of both.
        dtype: of the result.
        spec: how it is sharded, or None.
    """
    if not TYPES[kind].in_blocks:
        sums = jnp.int32 if jnp.issubdtype(a.values.dtype, jnp.integer) else jnp.float32
        wide, scale = plain_product(a.values, b.values, numbers, sums, spec), a.scale * b.scale
    elif a.whole is None or b.whole is None:
        return scaled_product(a.values, a.scale, b.values, b.scale, numbers, dtype=dtype, spec=spec)
    else:
        wide = scaled_product(a.values, a.scale, b.values, b.scale, numbers, dtype=jnp.float32, spec=spec)
        scale = a.whole * b.whole
    state = state_of(wide)
    if state.mode == "explicit" and (state.pending or state.copied):
        scale = place(scale, (), (), state.pending, names=())
    return (wide.astype(jnp.float32) * scale).astype(dtype)


def _opened(narrow: Rounded, like) -> jax.Array:
    """A narrow array as the numbers it stands for."""
    values, scale, whole, _ = narrow
    wide = opened(values, scale) if scale.ndim else values.astype(jnp.float32) * scale
    return (wide if whole is None else wide * whole).astype(like.dtype)
