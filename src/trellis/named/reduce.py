"""Reductions over names.

A reduction's result has the names that are left, placed as the layout says. Over a sliced name the result is
all-reduced; in manual mode only `sum` takes a sliced name, and leaves a partial sum.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from trellis.mesh.manual.ops import mark_pending
from trellis.mesh.manual.take import is_narrow
from trellis.named import backend
from trellis.named.arguments import dtypes_of_jax, keeps_dtype, number_of, numbers_of, ordered, slices_of_jax
from trellis.named.array import NamedArray
from trellis.named.axis import Axis, Name, Names, NamesError, once
from trellis.named.operand import check_sizes, on_one_mesh, operand, refuse_cut, refuse_dealt, refuse_others
from trellis.named.placing import bring, locally, spread, to_layout, whole
from trellis.notation import typeof
from trellis.notation.state import state_of


def names_of(x: NamedArray, over: Names | None, what: str) -> tuple[str, ...]:
    """Reads one or several names (or axes, whose sizes are checked), all of them for None.

    Raises:
        NamesError: one is absent, repeated, of another size, or not a name.
    """
    if over is None:
        refuse_cut(x.names, what, summed=what == "sum")
        return x.names
    asked = over if isinstance(over, tuple | list | set | frozenset) else (over,)
    names = tuple(x.names[x.index(o)] for o in asked)
    once(names, what)
    refuse_cut(names, what, summed=what == "sum")
    return names


def lift_reduction(fn: Callable, *, name: str | None = None, gather: bool = True) -> Callable[..., NamedArray]:
    """Turns a reduction `fn(array, axis=..., **kwargs)` into one over names.

    The result has the remaining names. `where`, if given, is a named mask whose
    names are among the array's.

    Args:
        fn: takes the positions of the dimensions that go, as a tuple.
        name: what errors call it.
        gather: whether sliced dimensions are gathered first, since JAX refuses it, or its gradient, on them.

    Raises:
        NamesError: JAX's types do not know how the function's result is sliced, for an array in slices; or the
            positions of a name are dealt out.
    """

    @functools.wraps(fn)
    def lifted(x: NamedArray, over: Names | None = None, *, where: NamedArray | None = None, **kwargs) -> NamedArray:
        with slices_of_jax((x,), name or getattr(fn, "__name__", "the function")):
            return reduction(fn, x, over, where=where, name=name, gather=gather, by_order=True, **kwargs)

    return lifted


def reduction(
    fn: Callable,
    x,
    over: Names | None,
    *,
    where=None,
    name: str | None = None,
    gather: bool = False,
    by_order: bool = False,
    **kwargs,
) -> NamedArray:
    """Applies a reduction of arrays over names.

    Args:
        by_order: whether the result may depend on the order of what is reduced.

    Raises:
        NamesError: a name is absent, or the mask has others or is not one of bools; or the order matters, and positions
            are dealt out.
        PendingSumError: `x` holds partial sums.
    """
    what = name or getattr(fn, "__name__", "the function")
    refuse_others((x,), what)
    if not isinstance(x, NamedArray) and over is None and where is None:
        return fn(x, **kwargs)
    x = operand(x, what, copies=False)  # else a loss may be copies, and `jax.grad` gives each a gradient of one
    gone = names_of(x, over, what)
    if by_order:
        refuse_dealt(gone, what, x)
    if gather or state_of(x.array).mode == "manual":
        x = whole(x, gone, what)
    if where is not None:
        x, kwargs["where"] = masked(x, where, what)
    with dtypes_of_jax((x,), what):
        array = fn(x.array, axis=tuple(x.index(n) for n in gone), **kwargs)
    return to_layout(without(x, array, gone))


def masked(x: NamedArray, mask, what: str) -> tuple[NamedArray, jax.Array]:
    """The array, and a mask as a plain array of its shape and placement.

    Raises:
        NamesError: it has names that `x` has not, other sizes, or is not one of bools.
    """
    mask = operand(mask, f"the mask of {what}")
    if mask.dtype != jnp.bool_:
        raise NamesError(f"a mask must be boolean, got {typeof(mask)}, in {what}: compare, as in `x > 0`")
    if extra := [n for n in mask.names if n not in x.names]:
        raise NamesError(
            f"a mask can only have names of its array, got '{extra[0]}' in {typeof(mask)} for {typeof(x)}: remove it"
        )
    check_sizes([x, mask], what)
    x, mask = on_one_mesh([x, mask], what)
    explicit = state_of(x.array).mode == "explicit"
    axes = dict(zip(x.names, state_of(x.array).axes, strict=True)) if explicit else None
    return x, spread(bring(mask, axes), x.names, axes, dict(zip(x.names, x.array.shape, strict=True)))


def without(x: NamedArray, array, gone) -> NamedArray:
    """What is left of `x` after `gone`, a named array."""
    kept = [i for i, n in enumerate(x.names) if n not in gone]
    return NamedArray(array, tuple(x.names[i] for i in kept), tuple(x.slices[i] for i in kept) if x.slices else ())


def sum(x, over: Names | None = None, *, where: NamedArray | None = None, dtype=None) -> NamedArray:
    """Sum over names, all of them if none are given.

    Linear: partial sums stay partial sums. In manual mode a sum over a sliced name is a partial sum.

    Names: those of `x` that are not in `over`.
    Gradient: to every position that counts; nothing moves.
    Moves: an all-reduce where a name in `over` is sliced.
    """
    refuse_others((x,), "sum")
    if not isinstance(x, NamedArray):
        return reduction(jnp.sum, x, None, dtype=dtype)
    x = operand(x, "sum", pending=where is None and getattr(x.array, "dtype", None) != jnp.bool_, copies=False)
    state = state_of(x.array)
    gone = names_of(x, over, "sum")
    sliced = tuple(a for n, axes in zip(x.names, x.slices, strict=False) if n in gone for a in axes)
    if state.mode == "manual" and (sliced or state.pending) and where is None:
        array = jnp.sum(x.array, axis=tuple(x.index(n) for n in gone), dtype=dtype)
        return without(x, mark_pending(array, sliced) if sliced else array, gone)
    if state.pending:
        like = jax.ShapeDtypeStruct((), x.dtype)
        dtype = jax.eval_shape(functools.partial(jnp.sum, dtype=dtype), like).dtype  # small whole numbers in 32 bits
        wide = x.array.astype(jnp.float32 if is_narrow(x) and x.dtype == dtype else dtype)
        return without(x, jax.lax.reduce_sum(wide, tuple(x.index(n) for n in gone)).astype(dtype), gone)
    return reduction(jnp.sum, x, gone, where=where, dtype=dtype)


def mean(x, over: Names | None = None, *, where: NamedArray | None = None) -> NamedArray:
    """Mean over names, all of them if none are given.

    Names: those of `x` that are not in `over`.
    Gradient: to every position that counts; nothing moves.
    Moves: an all-reduce where a name in `over` is sliced.
    """
    return reduction(jnp.mean, x, over, where=where)


def prod(x, over: Names | None = None, *, where: NamedArray | None = None) -> NamedArray:
    """Product over names; sliced ones are gathered first (JAX has no gradient there).

    Names: those of `x` that are not in `over`.
    Gradient: the product of all others; nothing moves.
    Moves: an all-gather of names in `over` that are sliced.
    """
    return reduction(_product, x, over, where=where, name="prod", gather=True)


def _product(array, axis: tuple[int, ...] | None = None, where=None):
    """`jnp.prod`, on each device's own slices: JAX's gradient takes the other dimensions apart, too."""
    if axis is None:
        return jnp.prod(array)
    array = array if where is None else jnp.where(where, array, jnp.ones((), array.dtype))
    # One dimension after the other: JAX cannot map the gradient of several at once over slices.
    one_by_one = lambda a: functools.reduce(lambda a, i: jnp.prod(a, i, keepdims=True), axis, a)
    return jnp.squeeze(locally(one_by_one, array), axis)


def max(x, over: Names | None = None, *, where: NamedArray | None = None, initial=None) -> NamedArray:
    """Largest value over names; if there are none, `initial`, or the lowest of the dtype.

    Names: those of `x` that are not in `over`.
    Gradient: shared equally by the positions that attain it; an all-reduce, to count these, where a name in `over` is
        sliced.
    Moves: an all-reduce where a name in `over` is sliced, and one of booleans of floats, which says where one is NaN.
    """
    ordered(x, "max")
    fn = functools.partial(_attained, jnp.max)
    return reduction(fn, x, over, where=where, name="max", initial=_least(x, where, initial, -1, "max"))


def min(x, over: Names | None = None, *, where: NamedArray | None = None, initial=None) -> NamedArray:
    """Smallest value over names; if there are none, `initial`, or the highest of the dtype.

    Names: those of `x` that are not in `over`.
    Gradient: shared equally by the positions that attain it; an all-reduce, to count these, where a name in `over` is
        sliced.
    Moves: an all-reduce where a name in `over` is sliced, and one of booleans of floats, which says where one is NaN.
    """
    ordered(x, "min")
    fn = functools.partial(_attained, jnp.min)
    return reduction(fn, x, over, where=where, name="min", initial=_least(x, where, initial, 1, "min"))


def _attained(fn: Callable, array, axis: tuple[int, ...] | None = None, where=None, initial=None):
    """`jnp.max` or `jnp.min`, which is NaN if one of the values is, also on another device."""
    made = _extreme(fn, axis, array, where, initial)
    if axis is None or not backend.loses_nan(array, axis):
        return made
    lost = jnp.any(jnp.isnan(array), axis=axis, where=where)
    return made * jnp.where(lost, np.array(np.nan, made.dtype), np.array(1, made.dtype))  # NumPy's: no NaN is made


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _extreme(fn: Callable, axis: tuple[int, ...] | None, array, where, initial):
    return fn(array, axis=axis, where=where, initial=initial)


@_extreme.defjvp
def _extreme_jvp(fn, axis, primals, tangents):
    """The derivative, from values in memory: XLA's CPU compiler computes cheap values twice, and rounds them
    differently the second time, so that the largest is found nowhere among them."""
    array, where, initial = primals
    given, moving = ((array,), tangents[:1]) if initial is None else ((array, initial), tangents[::2])
    alone = backend.by_itself(lambda x, first=None: fn(x, axis=axis, where=where, initial=first))
    return jax.jvp(alone, given, moving)


def all(x, over: Names | None = None, *, where: NamedArray | None = None) -> NamedArray:
    """Whether all values over names are true.

    Names: those of `x` that are not in `over`.
    Gradient: none; the result is bools.
    Moves: an all-reduce where a name in `over` is sliced.
    """
    return reduction(jnp.all, x, over, where=where)


def any(x, over: Names | None = None, *, where: NamedArray | None = None) -> NamedArray:
    """Whether some value over names is true.

    Names: those of `x` that are not in `over`.
    Gradient: none; the result is bools.
    Moves: an all-reduce where a name in `over` is sliced.
    """
    return reduction(jnp.any, x, over, where=where)


def var(x, over: Names | None = None, *, where: NamedArray | None = None, ddof: int = 0) -> NamedArray:
    """Variance over names: squares of differences from the mean, divided by their number less `ddof`.

    Names: those of `x` that are not in `over`.
    Gradient: elementwise, through the mean, too; an all-reduce where a name in `over` is sliced.
    Moves: an all-reduce where a name in `over` is sliced.
    """
    known = number_of(ddof, "ddof", "var", "pass 0 or 1")
    return reduction(_of_what_counts(jnp.var), x, over, where=where, ddof=known)


def std(x, over: Names | None = None, *, where: NamedArray | None = None, ddof: int = 0) -> NamedArray:
    """Standard deviation over names: the root of `var`.

    Names: those of `x` that are not in `over`.
    Gradient: elementwise, through the mean, too; an all-reduce where a name in `over` is sliced.
    Moves: an all-reduce where a name in `over` is sliced.
    """
    known = number_of(ddof, "ddof", "std", "pass 0 or 1")
    return reduction(_of_what_counts(jnp.std), x, over, where=where, ddof=known)


def _of_what_counts(fn: Callable) -> Callable:
    """`jnp.var` or `jnp.std` whose gradient, too, takes nothing from what a mask leaves out: JAX's is NaN everywhere if
    that is not finite."""

    @functools.wraps(fn)
    def counted(array, where=None, **kwargs):
        return fn(array if where is None else jnp.where(where, array, 0), where=where, **kwargs)

    return counted


def logsumexp(x, over: Names | None = None, *, where: NamedArray | None = None) -> NamedArray:
    """`log(sum(exp(x)))` over names, without overflow.

    Names: those of `x` that are not in `over`.
    Gradient: the softmax of `x`; nothing moves.
    Moves: an all-reduce where a name in `over` is sliced.
    """
    return reduction(backend.summed_in_range(jax.nn.logsumexp), x, over, where=where)


def nansum(x, over: Names | None = None, *, where: NamedArray | None = None) -> NamedArray:
    """Sum over names of what is not NaN.

    Names: those of `x` that are not in `over`.
    Gradient: to every position that counts; nothing moves.
    Moves: an all-reduce where a name in `over` is sliced.
    """
    return reduction(jnp.nansum, x, over, where=where)


def nanmean(x, over: Names | None = None, *, where: NamedArray | None = None) -> NamedArray:
    """Mean over names of what is not NaN.

    Names: those of `x` that are not in `over`.
    Gradient: to every position that counts; nothing moves.
    Moves: an all-reduce where a name in `over` is sliced.
    """
    return reduction(jnp.nanmean, x, over, where=where)


def nanmax(x, over: Names | None = None, *, where: NamedArray | None = None, initial=None) -> NamedArray:
    """Largest value over names that is not NaN.

    Names: those of `x` that are not in `over`.
    Gradient: shared equally by the positions that attain it; an all-reduce, to count these, where a name in `over` is
        sliced.
    Moves: an all-reduce where a name in `over` is sliced.
    """
    ordered(x, "nanmax")
    return reduction(jnp.nanmax, x, over, where=where, initial=_least(x, where, initial, -1, "nanmax"))


def nanmin(x, over: Names | None = None, *, where: NamedArray | None = None, initial=None) -> NamedArray:
    """Smallest value over names that is not NaN.

    Names: those of `x` that are not in `over`.
    Gradient: shared equally by the positions that attain it; an all-reduce, to count these, where a name in `over` is
        sliced.
    Moves: an all-reduce where a name in `over` is sliced.
    """
    ordered(x, "nanmin")
    return reduction(jnp.nanmin, x, over, where=where, initial=_least(x, where, initial, 1, "nanmin"))


def count_nonzero(x, over: Names | None = None) -> NamedArray:
    """How many values over names are not zero.

    Names: those of `x` that are not in `over`.
    Gradient: none; the result is a count.
    Moves: an all-reduce where a name in `over` is sliced.
    """
    return reduction(jnp.count_nonzero, x, over)


def _least(x, where, initial, sign: int, what: str):
    """What a largest or smallest value starts from if there may be none (a mask, or a size of 0)."""
    if initial is not None:
        (initial,) = numbers_of(what, f"take the {what} first, and maximum or minimum with it", initial=initial)
        if hasattr(x, "dtype") and x.dtype != jnp.bool_:  # of which 0 and 1 are values
            keeps_dtype(initial, x, "a first value", what)
    if initial is not None or (where is None and 0 not in np.shape(getattr(x, "array", x))):
        return initial
    if jnp.issubdtype(x.dtype, jnp.floating):
        info, endless = jnp.finfo(x.dtype), np.isinf(float(np.array(np.inf, x.dtype)))  # f8_e4m3fn has NaN in its place
        return sign * (jnp.inf if endless else float(info.max))
    if x.dtype == jnp.bool_:
        return sign > 0
    info = jnp.iinfo(x.dtype)
    return info.max if sign > 0 else info.min


def argmax(x: NamedArray, over: Name) -> NamedArray:
    """Position of the largest value along a name, the first of equal ones.

    Names: those of `x` but `over`.
    Gradient: none; the result is positions.
    Moves: an all-gather along `over` where it is sliced.
    """
    return _position(jnp.argmax, "argmax", x, over)


def argmin(x: NamedArray, over: Name) -> NamedArray:
    """Position of the smallest value along a name, the first of equal ones.

    Names: those of `x` but `over`.
    Gradient: none; the result is positions.
    Moves: an all-gather along `over` where it is sliced.
    """
    return _position(jnp.argmin, "argmin", x, over)


def _position(fn: Callable, what: str, x: NamedArray, over: Name) -> NamedArray:
    x = operand(x, what, copies=False)
    ordered(x, what)
    (name,) = names_of(x, over if isinstance(over, str | Axis) else (over,), what)
    if not x.shape[name]:
        raise NamesError(
            f"a position can only be found among values, got none in {typeof(x)} along '{name}', in {what}: skip it "
            "if there are none"
        )
    refuse_dealt((name,), what, x)
    x = whole(x, (name,), what) if state_of(x.array).mode == "manual" else x
    with dtypes_of_jax((x,), what):
        array = fn(x.array, axis=x.index(name))
    return to_layout(without(x, array, (name,)))
