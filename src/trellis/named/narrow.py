"""Narrow products: both factors in eight bits, each with one scale, the sum in 32.

`Narrow` marks a weight. `einsum`, `dot` and `dot_each` of a marked weight round both factors where they are before they
are moved, so that what is gathered is gathered in eight bits, and round the gradient of the result once for both of its
products. A scale is current: the largest element of the whole array, over all devices, becomes the largest number of
the type, so the result does not depend on the mesh.

fp8 takes e4m3 forward and e5m2 for gradients (Micikevicius et al., 2022, arXiv:2209.05433); int8 takes symmetric whole
numbers from -127 to 127 for all three (as in AQT and Jetfire: Xi et al., 2024, arXiv:2403.12422). mxfp8 takes e4m3 for
all three, with a scale for each tile of 32 by 32 numbers (`trellis.named.blocks`), so that one rounding serves the
products over either side of a tile.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.linear import linear
from trellis.mesh.reshard import place
from trellis.named.array import NamedArray
from trellis.named.axis import NamesError
from trellis.named.blocks import block_of, blocked, cut_by, opened
from trellis.named.scaled import scaled_product
from trellis.notation import spec_of, typeof
from trellis.notation.state import sharding_on, state_of

Kind = Literal["fp8", "int8", "mxfp8"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Types:
    forward: Any
    gradient: Any
    wide: Any
    in_blocks: bool = False


TYPES = {
    "fp8": _Types(jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32),
    "int8": _Types(jnp.int8, jnp.int8, jnp.int32),
    "mxfp8": _Types(jnp.float8_e4m3fn, jnp.float8_e4m3fn, jnp.float32, in_blocks=True),
}


class _OnlyFactor(NamesError, AttributeError):
    """What a named array has is asked of a narrow weight; to `hasattr` it has none of it."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["kind"])
@dataclasses.dataclass(frozen=True, slots=True)
class Narrow:
    """A weight whose products are made in eight bits. A factor of `einsum`, `dot` and `dot_each`, and nothing else.

    >>> x, w = tr.ones({"batch": 2, "embed": 4}), tr.full({"embed": 4, "mlp": 3}, 0.5)
    >>> tr.typeof(tr.dot(x, tr.Narrow(w, "fp8"), over="embed"))
    'f32[batch=2 mlp=3]'

    Attributes:
        weight: a named array of floats.
        kind: "fp8", "int8" or "mxfp8".
    """

    weight: NamedArray
    kind: Kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(NamedArray, name):
            raise AttributeError(f"a narrow weight has no {name!r}")
        raise _OnlyFactor(
            f"a narrow weight is a factor of einsum, dot or dot_each, got .{name} of {typeof(self.weight)}, whose "
            f"products are {self.kind}: take it out of the mark (`.weight`), or leave it without one"
        )


def marked(operands: tuple, what: str) -> tuple[tuple[NamedArray, ...], Kind | None]:
    """The operands of a product without their marks, and the kind of product that they ask for.

    Raises:
        NamesError: a narrow weight among fewer or more than two operands, or two that differ.
    """
    kinds = {x.kind for x in operands if isinstance(x, Narrow)}
    if not kinds:
        return operands, None
    plain = tuple(x.weight if isinstance(x, Narrow) else x for x in operands)
    if unknown := [kind for kind in kinds if kind not in TYPES]:
        raise NamesError(
            f"a narrow product is in {', '.join(TYPES)}, got '{unknown[0]}', in {what}: write one of these"
        )
    if wrong := [x for x in plain if hasattr(x, "dtype") and not jnp.issubdtype(x.dtype, jnp.floating)]:
        raise NamesError(f"a narrow product is one of floats, got {typeof(wrong[0])}, in {what}: cast it, with .astype")
    if len(kinds) > 1 or len(operands) != 2:
        raise NamesError(
            f"a narrow product is one of two factors, of one kind, got {', '.join(map(typeof, plain))} of kind "
            f"{' and '.join(sorted(kinds))}, in {what}: multiply two at a time"
        )
    return plain, kinds.pop()


def rounded(array, kind: Kind, dims: tuple[int, ...], *, gradient: bool = False) -> tuple[jax.Array, jax.Array]:
    """A plain array in narrow numbers, and the scale or scales that they are to be multiplied by.

    The array's gradient does not come through here. The type's largest number stands for the largest of an array or a
    tile; one with an element that is not finite has a scale that is not, and so has what is made of it.

    Args:
        array: what is rounded.
        kind: to which numbers.
        dims: the dimensions along which tiles lie, where a kind has them.
        gradient: whether it is a gradient.

    Raises:
        NamesError: slices would cut tiles.
    """
    fixed = lax.stop_gradient(array)
    state = state_of(fixed)
    if state.copied:
        fixed = place(fixed, state.axes)
    types = TYPES[kind]
    if types.in_blocks:
        if cut := [dim for dim in dims if cut_by(fixed, dim)]:
            raise NamesError(
                f"numbers that share a scale lie on one device, got {cut_by(fixed, cut[0])} slices of dimension "
                f"{cut[0]} of {typeof(fixed)}, in tiles of {block_of(fixed.shape[cut[0]])}, in a product in {kind}: "
                "slice it over fewer devices, or use fp8"
            )
        values, scales = blocked(fixed, dims)
        return values, _once(scales, array)
    values, scale = with_one_scale(fixed.astype(jnp.float32), kind, gradient=gradient)
    return values, _once(scale, array)


def with_one_scale(wide: jax.Array, kind: Kind, *, gradient: bool, over: tuple[str, ...] = ()):
    """Float32 numbers rounded by their largest: narrow numbers, and the scale.

    Args:
        wide: what is rounded.
        kind: to which numbers.
        gradient: whether it is a gradient.
        over: in manual mode, the mesh axes along which other devices have more of the numbers.
    """
    dtype = TYPES[kind].gradient if gradient else TYPES[kind].forward
    whole = jnp.issubdtype(dtype, jnp.integer)
    limit = 127.0 if whole else float(jnp.finfo(dtype).max)
    largest = jnp.max(jnp.abs(wide))
    if over:
        largest = lax.pmax(largest, over)
    scale = jnp.where(largest > 0, largest / limit, 1.0)
    scaled = jnp.clip(wide / scale, -limit, limit)
    return (jnp.round(scaled) if whole else scaled).astype(dtype), scale


# A narrow product's derivative takes the rounded factors as constants: differentiated again it would be zero where it
# is not. The scale depends on the array in a way that costs nothing, and says so.


@jax.custom_jvp
def _once(scale, array):
    return scale


@_once.defjvp
def _once_derivative(primals, tangents):
    return not_again(*primals), jnp.zeros_like(tangents[0])


@jax.custom_jvp
def not_again(scale, array):
    """The scale of what is made of an array in a first derivative; a second one is refused."""
    return scale


@not_again.defjvp
def _refused(primals, tangents):
    raise NamesError(
        f"a narrow product has first derivatives, got a second one, of a factor {typeof(primals[1])}: differentiate a "
        "model whose products are not narrow"
    )


def product(x, y, narrow_x, narrow_y, numbers, *, kind: Kind, dtype, spec=None) -> jax.Array:
    """`dot_general` of two plain arrays, made of their narrow forms.

    Args:
        x, y: the factors as they are moved for a plain product: of them only the types are used, forward, and the
            gradient is theirs. Their values, and so what moved them, are not part of the program.
        narrow_x, narrow_y: from `rounded`, moved likewise.
        numbers: dimension numbers as `dot_general` takes them.
        kind: which types.
        dtype: of the result.
        spec: how the result is sharded, or None.

    Raises:
        NamesError: in manual mode.
    """
    if state_of(x).mode == "manual":
        raise NamesError(
            f"a narrow product takes whole arrays, whose largest element is their scale, got slices of {typeof(x)} and "
            f"{typeof(y)} in manual mode: multiply outside of shard_map, or plain factors"
        )
    summed, batch = (tuple(tuple(int(i) for i in dims) for dims in group) for group in numbers)
    static = _Static(kind, (summed, batch), spec, jnp.dtype(dtype), (x.dtype, y.dtype), (state_of(x), state_of(y)))
    return _product(static, x, y, *narrow_x, *narrow_y)


@dataclasses.dataclass(frozen=True, slots=True)
class _Static:
    kind: Kind
    numbers: tuple
    spec: Any
    dtype: Any
    dtypes: tuple
    states: tuple


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(static: _Static, x, y, qx, sx, qy, sy):
    return _scaled(qx, sx, qy, sy, static.numbers, static.kind, static.dtype, static.spec)


@_product.defjvp
def _derivative(static: _Static, primals, tangents):
    fixed = primals[2:]
    out = _scaled(*fixed, static.numbers, static.kind, static.dtype, static.spec)  # no `x` and `y`: see `product`

    def change(fixed, moving):
        (qx, sx, qy, sy), (dx, dy) = fixed, moving
        dot = functools.partial(_plain, numbers=static.numbers, dtype=static.dtype, spec=static.spec)
        return dot(dx, _opened(qy, sy, dx)) + dot(_opened(qx, sx, dy), dy)

    def gradients(fixed, gradient):
        qx, sx, qy, sy = fixed
        q, s = rounded(gradient, static.kind, _innermost(static), gradient=True)
        s = not_again(s, gradient)
        return _gradient(static, 0, q, s, qy, sy), _gradient(static, 1, q, s, qx, sx)

    return out, linear(change, gradients)(fixed, (tangents[0], tangents[1]))


def _innermost(static: _Static) -> tuple[int, ...]:
    """Of a product's result, the last dimension that comes from either factor."""
    summed, batch = static.numbers
    free = [len(state.axes) - len(s) - len(b) for state, s, b in zip(static.states, summed, batch, strict=True)]
    ends = (len(batch[0]) + free[0], len(batch[0]) + free[0] + free[1])
    return tuple(end - 1 for end, count in zip(ends, free, strict=True) if count)


def _gradient(static: _Static, which: int, q, s, other, scale) -> jax.Array:
    """The gradient of one factor: the product of the result's with the other factor."""
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
    out = _scaled(q, s, other, scale, numbers, static.kind, static.dtypes[which], spec)
    return jnp.transpose(out, [made.index(i) for i in range(ranks[which])])


def _scaled(a, sa, b, sb, numbers, kind: Kind, dtype, spec) -> jax.Array:
    """The product of two narrow arrays, times their scales; partial sums are scaled before they are summed."""
    if TYPES[kind].in_blocks:
        return scaled_product(a, sa, b, sb, numbers, dtype=dtype, spec=spec)
    wide = _plain(a, b, numbers=numbers, dtype=TYPES[kind].wide, spec=spec)
    scale = sa * sb
    state = state_of(wide)
    if state.mode == "explicit" and (state.pending or state.copied):
        scale = place(scale, (), (), state.pending, names=())
    return (wide.astype(jnp.float32) * scale).astype(dtype)


def _plain(a, b, *, numbers, dtype, spec) -> jax.Array:
    sharding = None if spec is None else sharding_on(a, spec)
    return lax.dot_general(a, b, numbers, preferred_element_type=dtype, out_sharding=sharding)


def _opened(q, scale, like) -> jax.Array:
    """A narrow array as the number that it stands for."""
    if scale.ndim:
        return opened(q, scale, like.dtype)
    return (q.astype(jnp.float32) * scale).astype(like.dtype)
