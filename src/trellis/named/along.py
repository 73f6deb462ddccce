"""Functions along a name that keep it: cumulative sums, sorting, softmax.

JAX refuses most of them, or their gradients, on a sliced dimension, which is therefore gathered first; the ledger shows
it. `softmax` and `log_softmax` run on slices.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from trellis._compat import mapped_over
from trellis.named import backend
from trellis.named.arguments import count_of, dtypes_of_jax, of_shape, ordered, refuse_keys, slices_of_jax
from trellis.named.array import NamedArray
from trellis.named.axis import Axis, Name, Names, NamesError
from trellis.named.operand import operand, refuse_dealt
from trellis.named.placing import locally, settle_selected, to_layout, whole
from trellis.named.reduce import masked, names_of
from trellis.notation import typeof
from trellis.notation.state import state_of


def lift_along(fn: Callable, *, name: str | None = None, gather: bool = True) -> Callable[..., NamedArray]:
    """Turns a function along one dimension, `fn(array, axis=...)`, into one along a name.

    Args:
        fn: gives an array of the same shape.
        name: what errors call it.
        gather: whether a sliced dimension is gathered first, since JAX refuses it there.

    Raises:
        NamesError: JAX's types do not know how the function's result is sliced, for an array in slices; or the
            positions along the name are dealt out.
    """

    what = name or getattr(fn, "__name__", "the function")

    @functools.wraps(fn)
    def checked(array, **kwargs):
        return of_shape(array.shape, fn(array, **kwargs), what)

    @functools.wraps(fn)
    def lifted(x: NamedArray, along: Name, **kwargs) -> NamedArray:
        with slices_of_jax((x,), what):
            return apply_along(checked, x, along, name=what, gather=gather, **kwargs)

    return lifted


def apply_along(
    fn: Callable, x: NamedArray, along: Name, *, name: str | None = None, gather=True, local=False, **kwargs
) -> NamedArray:
    """Applies a function of arrays along a name.

    Args:
        local: whether each device runs its own slices of the other dimensions, since JAX refuses a gradient on them.

    Raises:
        NamesError: the name is absent, or sliced in manual mode or under a strict layout.
        PendingSumError: `x` holds partial sums.
    """
    what = name or getattr(fn, "__name__", "the function")
    x = operand(x, what, copies=False)
    along = _one(x, along, what)
    refuse_dealt((along,), what, x)
    if gather or state_of(x.array).mode == "manual":
        x = whole(x, (along,), what)
    run = functools.partial(fn, axis=x.index(along), **kwargs)
    if gather and state_of(x.array).mode == "auto":
        # On slices XLA ends some of these with an error of its own, such as derivatives of a cumulative product, in
        # which what comes from behind is sliced too.
        spec = jax.P(*(None if n == along else jax.P.UNCONSTRAINED for n in x.names))
        here = jax.NamedSharding(jax.typeof(x.array).sharding.mesh, spec)
        with dtypes_of_jax((x,), what):
            made = run(jax.lax.with_sharding_constraint(x.array, here))
        return to_layout(x.with_array(jax.lax.with_sharding_constraint(made, here)))
    with dtypes_of_jax((x,), what):
        array = locally(run, x.array) if local else run(x.array)
    return to_layout(x.with_array(array))


def _one(x: NamedArray, along: Name, what: str) -> str:
    (name,) = names_of(x, along if isinstance(along, str | Axis) else (along,), what)
    return name


def cumsum(x: NamedArray, along: Name, *, reverse: bool = False) -> NamedArray:
    """Sums of all values up to each position along a name; with `reverse`, from it on.

    Names: those of `x`.
    Gradient: cumulative sums from the other end; an all-gather where the name is sliced.
    Moves: an all-gather along the name where it is sliced.
    """
    return apply_along(_reversible(jnp.cumsum, reverse), x, along, name="cumsum")


def cumprod(x: NamedArray, along: Name, *, reverse: bool = False) -> NamedArray:
    """Products of all values up to each position along a name; with `reverse`, from it on.

    Names: those of `x`.
    Gradient: through every product that a value enters; an all-gather where the name is sliced.
    Moves: an all-gather along the name where it is sliced.
    """
    return apply_along(_reversible(jnp.cumprod, reverse), x, along, name="cumprod")


def cummax(x: NamedArray, along: Name, *, reverse: bool = False) -> NamedArray:
    """Largest of all values up to each position along a name; with `reverse`, from it on.

    Names: those of `x`.
    Gradient: to the values that the result repeats; an all-gather where the name is sliced.
    Moves: an all-gather along the name where it is sliced.
    """
    return apply_along(lambda a, axis: jax.lax.cummax(a, axis, reverse=reverse), x, along, name="cummax")


def _reversible(fn: Callable, reverse: bool) -> Callable:
    return (lambda a, axis: jnp.flip(fn(jnp.flip(a, axis), axis=axis), axis)) if reverse else fn


def sort(x: NamedArray, along: Name, *, descending: bool = False) -> NamedArray:
    """The values sorted along a name.

    Names: those of `x`.
    Gradient: back to where each value came from; an all-gather where the name is sliced.
    Moves: an all-gather along the name where it is sliced.
    """
    # Of no values the derivative of `_sorted` would be zeros that all devices hold alike.
    run = lambda a, axis: _sorted(descending, a, axis) if a.size else a
    refuse_keys((x,), "sort")
    return apply_along(run, x, along, name="sort", local=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 2))
def _sorted(descending: bool, a, axis: int):
    return jnp.sort(a, axis=axis, descending=descending)


@_sorted.defjvp
def _sorted_jvp(descending: bool, axis: int, values, changes):
    """The derivative: JAX's own fails in a mapped function over slices.

    Values are sorted again, not taken from their places: in what is compiled or kept for a backward pass, JAX (0.10.2)
    assumes a mapped dimension of a rule's value to be where it is in the function's.
    """
    (a,), (change,) = values, changes
    places = _places(a, axis, descending=descending)
    moved = jnp.take_along_axis(change, places, axis=axis) if jnp.issubdtype(a.dtype, jnp.inexact) else change
    return _sorted(descending, a, axis), moved


def _places(a, axis: int, *, descending: bool = False):
    """The positions that sort, which have no derivative: JAX's own fails in a mapped function over slices."""
    return jnp.argsort(jax.lax.stop_gradient(a), axis=axis, descending=descending)


def argsort(x: NamedArray, along: Name, *, descending: bool = False) -> NamedArray:
    """The positions along a name that sort it; equal values keep their order.

    Names: those of `x`.
    Gradient: none; the result is positions.
    Moves: an all-gather along the name where it is sliced.
    """
    refuse_keys((x,), "argsort")
    return apply_along(_places, x, along, name="argsort", local=True, descending=descending)


def flip(x: NamedArray, along: Name) -> NamedArray:
    """The values along a name, last first.

    Names: those of `x`.
    Gradient: back to where each value came from; an all-gather where the name is sliced.
    Moves: an all-gather along the name where it is sliced.
    """
    return apply_along(jnp.flip, x, along)


def softmax(x: NamedArray, over: Names, *, where: NamedArray | None = None) -> NamedArray:
    """`exp(x)` divided by its sum over names.

    Names: those of `x`.
    Gradient: elementwise, less a sum over the names; an all-reduce where one of them is sliced.
    Moves: an all-reduce of the largest values and one of the sums, where a name in `over` is sliced.

    Args:
        x: any named array.
        over: one name or several.
        where: a mask whose names are among the array's: what it leaves out counts nothing and gets 0.
    """
    return _normalized(jax.nn.softmax, "softmax", x, over, where)


def log_softmax(x: NamedArray, over: Names, *, where: NamedArray | None = None) -> NamedArray:
    """The logarithm of `softmax`; with a mask, minus infinity where it leaves a value out.

    Names: those of `x`.
    Gradient: elementwise, less a sum over the names; an all-reduce where one of them is sliced.
    Moves: an all-reduce of the largest values and one of the sums, where a name in `over` is sliced.
    """
    return _normalized(jax.nn.log_softmax, "log_softmax", x, over, where)


def _normalized(fn: Callable, what: str, x: NamedArray, over: Names, where: NamedArray | None) -> NamedArray:
    x = operand(x, what, copies=False)
    ordered(x, what)
    names = names_of(x, over, what)
    if state_of(x.array).mode == "manual":
        x = whole(x, names, what)
    mask = None
    if where is not None:
        x, mask = masked(x, where, what)
    with dtypes_of_jax((x,), what):
        fn = backend.summed_in_range(fn)
        return x.with_array(fn(x.array, axis=tuple(x.index(n) for n in names), where=mask))


def top_k(x: NamedArray, along: Name, k: int, *, new_name: Name | None = None) -> tuple[NamedArray, NamedArray]:
    """The k largest values along a name, and their positions.

    Names: those of `x`; the name of the k values is `new_name`.
    Gradient: to the values that were picked; nothing moves.
    Moves: an all-gather along the name where it is sliced.

    Args:
        x: any named array.
        along: the name.
        k: how many.
        new_name: the name of the dimension of length k; the old one if not given.

    Raises:
        NamesError: k is larger than the axis, or an axis given for `new_name` has another size.
    """
    x = operand(x, "top_k", copies=False, keys=False)
    name = _one(x, along, "top_k")
    k = count_of(k, "top_k", f"write top_k(x, '{name}', 2)")
    if not 0 <= k <= x.shape[name]:
        raise NamesError(
            f"top_k needs a k from 0 to the size of the axis, got k={k} for {typeof(x)} along '{name}': use a k in "
            "this range"
        )
    if isinstance(new_name, Axis) and new_name.size != k:
        raise NamesError(f"the new axis of top_k must have size k, got k={k} and {new_name}, in top_k: pass one size")
    x = whole(x, (name,), "top_k")
    i = x.index(name)

    sliced = mapped_over()

    def largest(array):
        if not sliced:
            return tuple(jnp.moveaxis(a, -1, i) for a in jax.lax.top_k(jnp.moveaxis(array, i, -1), k))
        # XLA gathers slices that its own `top_k` is mapped over, and leaves those of a sort where they are.
        places = _places(array, i, descending=True).astype(jnp.int32)
        places = jax.lax.slice_in_dim(places, 0, k, axis=i)
        return jnp.take_along_axis(array, places, axis=i), places

    short = new_name.name if isinstance(new_name, Axis) else new_name or name
    refuse_dealt((short,), "top_k", x)
    names = tuple(short if n == name else n for n in x.names)
    with dtypes_of_jax((x,), "top_k"):
        # JAX cannot compile what each device makes of nothing of its slices.
        found = locally(largest, x.array) if k else largest(x.array)
    values, places = (settle_selected(NamedArray(a, names, x.slices), (short,)) for a in found)
    return values, places
