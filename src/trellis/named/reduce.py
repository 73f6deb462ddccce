"""Reductions over names, and functions along one name."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from trellis.mesh.manual.ops import mark_pending
from trellis.named.array import NamedArray
from trellis.named.axis import Axis, NamesError
from trellis.named.placing import refuse_pending, settle, spread, whole
from trellis.notation import typeof
from trellis.notation.state import state_of

Over = "str | Axis | tuple[str, ...] | None"


def names_of(x: NamedArray, over) -> tuple[str, ...]:
    """Reads one or several names (or axes), all of them for None.

    Raises:
        NamesError: one is absent.
    """
    if over is None:
        return x.names
    over = (over,) if isinstance(over, str | Axis) else tuple(over)
    over = tuple(o.name if isinstance(o, Axis) else o for o in over)
    for name in over:
        x.index(name)
    return over


def lift_reduction(fn, *, name: str | None = None) -> Callable[..., NamedArray]:
    """Makes a reduction `fn(array, axis=..., **kwargs)` one over names.

    The result has the remaining names. `where`, if given, is a named mask whose
    names are among the array's.
    """
    name = name or fn.__name__

    @functools.wraps(fn)
    def lifted(x: NamedArray, over=None, *, where: NamedArray | None = None, **kwargs) -> NamedArray:
        refuse_pending(x, name)
        gone = names_of(x, over)
        if state_of(x.array).mode == "manual":
            x = whole(x, gone, name)
        if where is not None:
            if extra := [n for n in where.names if n not in x.names]:
                raise NamesError(
                    f"a mask has names of its array, got '{extra[0]}' in {typeof(where)} for {typeof(x)}: remove it"
                )
            _, mask = _align(x, where)
            kwargs["where"] = mask
        array = fn(x.array, axis=tuple(x.index(n) for n in gone), **kwargs)
        return settle(_without(x, array, gone))

    return lifted


def _align(x: NamedArray, mask: NamedArray):
    from trellis.named.placing import bring

    axes = dict(zip(x.names, state_of(x.array).axes, strict=True))
    mask = bring(mask, axes if state_of(x.array).mode == "explicit" else None)
    return x, spread(
        mask,
        x.names,
        axes if state_of(x.array).mode == "explicit" else None,
        dict(zip(x.names, x.array.shape, strict=True)),
    )


def _without(x: NamedArray, array, gone) -> NamedArray:
    kept = [i for i, n in enumerate(x.names) if n not in gone]
    return NamedArray(array, tuple(x.names[i] for i in kept), tuple(x.slices[i] for i in kept) if x.slices else ())


def sum(x: NamedArray, over=None, *, where: NamedArray | None = None, dtype=None) -> NamedArray:
    """Sum over names. In manual mode a sum over a sliced name is a partial sum."""
    state = state_of(x.array)
    gone = names_of(x, over)
    sliced = tuple(a for n, axes in zip(x.names, x.slices, strict=False) if n in gone for a in axes)
    if state.mode == "manual" and (sliced or state.pending) and where is None:
        array = jnp.sum(x.array, axis=tuple(x.index(n) for n in gone), dtype=dtype)
        return _without(x, mark_pending(array, sliced) if sliced else array, gone)
    if state.pending and where is None:
        return _without(x, jax.lax.reduce_sum(x.array, tuple(x.index(n) for n in gone)), gone)
    return _sum(x, over, where=where, dtype=dtype)


_sum = lift_reduction(jnp.sum)

REDUCTIONS = {
    fn: lift_reduction(getattr(jnp, fn))
    for fn in "mean max min prod any all var std nansum nanmean nanmax nanmin count_nonzero".split()
}
REDUCTIONS["sum"] = sum
REDUCTIONS["logsumexp"] = lift_reduction(jax.nn.logsumexp, name="logsumexp")


def lift_along(fn, *, name: str | None = None, gather: bool = True) -> Callable[..., NamedArray]:
    """Makes a function along one dimension, `fn(array, axis=...)`, one along a name.

    Args:
        fn: gives an array of the same shape.
        name: what errors call it.
        gather: JAX refuses it on a sliced dimension, so that one axis is gathered first.
    """
    name = name or fn.__name__

    @functools.wraps(fn)
    def lifted(x: NamedArray, along: str | Axis, **kwargs) -> NamedArray:
        refuse_pending(x, name)
        (along,) = names_of(x, along)
        if gather or state_of(x.array).mode == "manual":
            x = whole(x, (along,), name)
        return x.with_array(fn(x.array, axis=x.index(along), **kwargs))

    return lifted


ALONG = {fn: lift_along(getattr(jnp, fn)) for fn in "cumsum cumprod sort argsort flip".split()}
ALONG["cummax"] = lift_along(lambda a, axis: jax.lax.cummax(a, axis=axis), name="cummax")
ALONG["softmax"] = lift_along(jax.nn.softmax, gather=False)
ALONG["log_softmax"] = lift_along(jax.nn.log_softmax, gather=False)


def argmax(x: NamedArray, over: str | Axis) -> NamedArray:
    """Position of the largest value along a name."""
    return _arg(jnp.argmax, x, over)


def argmin(x: NamedArray, over: str | Axis) -> NamedArray:
    """Position of the smallest value along a name."""
    return _arg(jnp.argmin, x, over)


def _arg(fn, x, over):
    refuse_pending(x, fn.__name__)
    (name,) = names_of(x, over)
    x = whole(x, (name,), fn.__name__) if state_of(x.array).mode == "manual" else x
    return settle(_without(x, fn(x.array, axis=x.index(name)), (name,)))


def top_k(x: NamedArray, along: str | Axis, k: int, *, new_name: str | None = None) -> tuple[NamedArray, NamedArray]:
    """The k largest values along a name, and their positions.

    Args:
        x: any named array.
        along: the name.
        k: how many.
        new_name: the name of the dimension of length k; the old one if not given.

    Raises:
        NamesError: k is larger than the axis.
    """
    refuse_pending(x, "top_k")
    (name,) = names_of(x, along)
    if k > x.shape[name]:
        raise NamesError(f"top_k picks at most all of an axis, got k={k} for {typeof(x)} along '{name}': lower k")
    x = whole(x, (name,), "top_k")
    i = x.index(name)
    values, positions = jax.lax.top_k(jnp.moveaxis(x.array, i, -1), k)
    names = tuple(new_name or n if n == name else n for n in x.names)
    return tuple(NamedArray(jnp.moveaxis(a, -1, i), names, x.slices) for a in (values, positions))
