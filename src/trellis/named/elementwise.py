"""Elementwise operations: how a function of arrays becomes one of named arrays, and the linear ones."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from trellis._compat import is_tracer
from trellis.mesh.reshard import place
from trellis.named import backend
from trellis.named.arguments import dtype_of, dtypes_of_jax, function_of, of_shape, slices_of_jax
from trellis.named.array import NamedArray
from trellis.named.axis import NamesError
from trellis.named.operand import (
    check_contained,
    check_sizes,
    on_one_mesh,
    operand,
    refuse_others,
    refuse_pending,
    union,
)
from trellis.named.placing import assign, bring, missing_axes, move, spread, widen
from trellis.notation import spec_of, typeof
from trellis.notation.state import sharding_on, state_of


def lift(fn: Callable, *, name: str | None = None) -> Callable[..., NamedArray]:
    """Turns an elementwise function of arrays into one of named arrays, broadcasting by name.

    >>> from trellis.named import named
    >>> softplus = lift(jax.nn.softplus)
    >>> softplus(named(jnp.zeros(3), "embed")).names
    ('embed',)

    Args:
        fn: takes arrays that broadcast against each other (and scalars) and gives an array of their common shape.
        name: what errors call it.

    Raises:
        NamesError: JAX's types do not know how the function's result is sliced, for an array in slices.
    """

    what = name or getattr(fn, "__name__", "the function")

    @functools.wraps(fn)
    def checked(*arrays, **kwargs):
        return of_shape(jnp.broadcast_shapes(*map(jnp.shape, arrays)), fn(*arrays, **kwargs), what)

    @functools.wraps(fn)
    def lifted(*args, **kwargs):
        with slices_of_jax(args, what):
            return by_name(checked, *args, name=what, **kwargs)

    return lifted


def by_name(fn: Callable, *args, name: str | None = None, **kwargs) -> NamedArray:
    """Applies an elementwise function of arrays to named arrays, plain scalars and numbers.

    Raises:
        NamesError: a plain array with dimensions, a name with two sizes, or no operand that has all the names.
        PendingSumError: an operand holds partial sums.
    """
    what = name or getattr(fn, "__name__", "the function")
    refuse_others(args, what)
    if not any(isinstance(a, NamedArray) for a in args):
        return fn(*args, **kwargs)
    arrays, names, slices = together(args, what)
    fn = _met(functools.partial(fn, **kwargs) if kwargs else fn, arrays)
    with dtypes_of_jax(args, what):
        return NamedArray(fn(*arrays), names, slices)


def together(args, what: str):
    """The plain arrays of elementwise operands, placed and of one rank, with the result's names and slices.

    Raises:
        NamesError: a plain array with dimensions, a name with two sizes, or no operand that has all the names.
        PendingSumError: an operand holds partial sums.
    """
    for a in args:
        if not isinstance(a, NamedArray) and getattr(a, "ndim", 0):
            types = " and ".join(typeof(o) for o in args)
            raise NamesError(
                f"a named operation takes named arrays and scalars, got {types} in {what}: name the dimensions with "
                "named(array, '...')"
            )
    args = [operand(a, what) if isinstance(a, NamedArray) else a for a in args]
    operands = [a for a in args if isinstance(a, NamedArray)]
    if len(operands) == 1:
        (only,) = operands
        return [a.array if a is only else a for a in args], only.names, only.slices
    check_sizes(operands, what)
    names = union(operands)
    check_contained(operands, names, what)
    operands = on_one_mesh(operands, what)
    where = assign(operands, names)
    rest = iter(_brought(operands, where))
    arrays = [widen(next(rest), names) if isinstance(a, NamedArray) else a for a in args]
    slices = tuple(where[name] for name in names) if where and any(x.slices for x in operands) else ()
    return arrays, names, slices


def _brought(operands: list[NamedArray], where) -> list[NamedArray]:
    """The operands, placed; copies (`~`) that meet nothing but copies along the same mesh axes stay copies."""
    if where is None:
        return operands
    copied = state_of(operands[0].array).copied
    if not copied or any(state_of(x.array).copied != copied or missing_axes(x, where) for x in operands):
        return [bring(x, where) for x in operands]
    kept = copied - {a for axes in where.values() for a in axes}
    return [move(x, tuple(where[name] for name in x.names), kept) for x in operands]


def _met(fn: Callable, arrays: list) -> Callable:
    """The function for these operands, which may be copies (`~`), or arrays that the backend sums otherwise."""
    plain = [a for a in arrays if hasattr(a, "ndim")]
    states = [state_of(a) for a in plain]
    copies = any(s.copied for s in states)
    if copies and len(alike := {s for s in states if s.axes or s.copied}) == 1:
        (state,) = alike
        return _of_copies(fn, arrays, state.copied) if state.mode == "explicit" else fn
    if len(states) < 2:
        return fn
    shape = jnp.broadcast_shapes(*(a.shape for a in plain))
    if not copies and not any(backend.sums_wide(a, shape) for a in plain):
        return fn
    return _broadcasting(fn, shape, plain, states)


def _broadcasting(fn: Callable, shape: tuple[int, ...], plain: list, states: list) -> Callable:
    """The function, with some operands broadcast first.

    These are copies (`~`), and operands that the backend sums otherwise. JAX refuses copies beside slices in an
    elementwise operation; broadcast to the others' slices they are slices too, and their gradient is a partial sum. The
    broadcast array is not kept for the backward pass.
    """
    axes = [max((s.axes[i] for s in states if s.axes), key=len) for i in range(len(shape))]
    # The mesh is that of an operand which is on one: a number need not be.
    on_mesh = next((a for a, s in zip(plain, states, strict=True) if s.mode == "explicit"), None)
    sharding = None if on_mesh is None else sharding_on(on_mesh, spec_of(axes))

    def broadcast(*arrays):
        first = lambda a: hasattr(a, "ndim") and (state_of(a).copied or backend.sums_wide(a, shape))
        return fn(*(backend.broadcast(a, shape, sharding) if first(a) else a for a in arrays))

    return jax.checkpoint(broadcast, prevent_cse=False)


def _of_copies(fn: Callable, arrays: list, copied: frozenset[str]) -> Callable:
    """The function, if all arrays but numbers are copies (`~`) along these mesh axes.

    The result is copies too, and the gradient stays a partial sum. JAX has few operations on partial sums, not even a
    minus. So the derivative is computed from arrays that are not copies, and is then just a factor.
    """
    plain = lambda a: place(a, state_of(a).axes) if isinstance(a, jax.Array) else a
    hold = lambda a: place(a, state_of(a).axes, (), copied)
    varied = [i for i, a in enumerate(arrays) if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jnp.inexact)]
    at = [plain(a) for a in arrays]
    if any(jnp.iscomplexobj(a) for a in at):  # whose derivative need not be a factor, as a conjugate's is not
        return lambda *arrays: hold(fn(*map(plain, arrays)))

    def of_varied(*mine):
        rest = iter(mine)
        return fn(*(next(rest) if i in varied else a for i, a in enumerate(at)))

    if not varied or not jnp.issubdtype(jax.eval_shape(fn, *at).dtype, jnp.inexact):
        return lambda *_: fn(*at)

    @jax.custom_jvp
    def result(*mine):
        return hold(of_varied(*map(plain, mine)))

    @result.defjvp
    def derivative(primals, tangents):
        mine = [plain(a) for a in primals]
        slopes = [jax.jvp(functools.partial(_with, of_varied, mine, i), (a,), (jnp.ones_like(a),))[1]
                  for i, a in enumerate(mine)]  # fmt: skip
        parts = [hold(slope) * hold(tangent).astype(slope.dtype) for slope, tangent in zip(slopes, tangents)]
        return result(*primals), functools.reduce(jnp.add, parts)

    return lambda *arrays: result(*(arrays[i] for i in varied))


def _with(fn: Callable, arrays: list, index: int, array):
    """`fn(*arrays)`, with another array in one place."""
    return fn(*arrays[:index], array, *arrays[index + 1 :])


def outer(fn: Callable, *operands: NamedArray) -> NamedArray:
    """Applies an elementwise function to all combinations of operands' positions.

    Operations broadcast on their own only if one operand's names contain the other's; this asks for the rest:
    `outer(greater_equal, arange(pos), arange(key_pos))` is a causal mask, `"pos key_pos"`. Products have `einsum`.

    Names: those of all operands, the first's first.
    Gradient: elementwise; a reduce-scatter for an operand that was gathered, an all-reduce for one that was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.

    Args:
        fn: a function by name, such as `greater_equal` or `add`.
        *operands: named arrays, each of which is broadcast to all names, in the order in which these appear.

    Raises:
        NamesError: a name with two sizes.
    """
    function_of(fn, "outer", "write outer(greater_equal, x, y)")
    what = f"outer({getattr(fn, '__name__', 'the function')}, ...)"
    operands = tuple(on_one_mesh([operand(x, what) for x in operands], what))
    check_sizes(list(operands), what)
    names = tuple(dict.fromkeys(n for x in operands for n in x.names))
    where = assign(list(operands), names)
    sizes = {n: s for x in operands for n, s in zip(x.names, x.array.shape, strict=True)}
    slices = tuple(where[n] for n in names) if where and any(x.slices for x in operands) else ()
    spreading = [NamedArray(spread(bring(x, where), names, where, sizes), names, slices) for x in operands]
    return fn(*spreading)


# The linear operations, which take partial sums.


def add(x, y) -> NamedArray:
    """`x + y`. Partial sums may be added to partial sums over the same mesh axes.

    Names: those of the operand that has all of them.
    Gradient: elementwise; a reduce-scatter for an operand that was gathered, an all-reduce for one that was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return _sum_of_pending(x, y, "add") if _pending(x, y) else by_name(jnp.add, x, y)


def subtract(x, y) -> NamedArray:
    """`x - y`. Partial sums over the same mesh axes may be subtracted from each other.

    Names: those of the operand that has all of them.
    Gradient: elementwise; a reduce-scatter for an operand that was gathered, an all-reduce for one that was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return _sum_of_pending(x, negative(y), "subtract") if _pending(x, y) else by_name(jnp.subtract, x, y)


def negative(x) -> NamedArray:
    """`-x`, also of partial sums.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return _scaled(x, np.array(-1).astype(_array(x).dtype)) if _pending(x) else by_name(jnp.negative, x)


def multiply(x, y) -> NamedArray:
    """`x * y`. Partial sums may be multiplied by a number or another scalar.

    Names: those of the operand that has all of them.
    Gradient: elementwise; a reduce-scatter for an operand that was gathered, an all-reduce for one that was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    if not _pending(x, y):
        return by_name(jnp.multiply, x, y)
    return _scaled(x, y) if _pending(x) else _scaled(y, x)


def divide(x, y) -> NamedArray:
    """`x / y`. Partial sums may be divided by a number or another scalar.

    Names: those of the operand that has all of them.
    Gradient: elementwise; a reduce-scatter for an operand that was gathered, an all-reduce for one that was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    if not _pending(x):
        return by_name(jnp.true_divide, x, y)
    like = jax.ShapeDtypeStruct((), _array(x).dtype)
    return _scaled(x, 1 / y, jax.eval_shape(jnp.true_divide, like, like).dtype)


def clip(x, min=None, max=None) -> NamedArray:
    """The values, none below `min` or above `max`.

    Names: those of `x`, which has the bounds' names.
    Gradient: elementwise; a reduce-scatter for an operand that was gathered, an all-reduce for one that was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    bounds = [b for b in (min, max) if b is not None]
    lower, upper = min is not None, max is not None

    def clipped(a, *bounds):
        rest = list(bounds)
        return jnp.clip(a, rest.pop(0) if lower else None, rest.pop(0) if upper else None)

    return by_name(clipped, x, *bounds, name="clip")


def where(condition, x, y) -> NamedArray:
    """`x` where the condition is true, `y` elsewhere.

    Names: those of the operand that has all of them.
    Gradient: elementwise; a reduce-scatter for an operand that was gathered, an all-reduce for one that was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.where, condition, x, y)


def astype(x, dtype) -> NamedArray:
    """The same values in another dtype. Partial sums stay partial sums in another float type.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.

    Raises:
        PendingSumError: partial sums as whole numbers, each of which would be rounded, or of truths, which would count.
    """
    dtype = dtype_of(dtype, "astype")
    if not isinstance(x, NamedArray):
        return x.astype(dtype)
    linear = jnp.issubdtype(dtype, jnp.inexact) and getattr(x.array, "dtype", None) != jnp.bool_
    x = operand(x, f"astype({dtype.name})", pending=linear, keys=False)
    return x.with_array(x.array.astype(dtype))


def _array(x):
    return x.array if isinstance(x, NamedArray) else x


def _pending(*args) -> frozenset[str]:
    """The mesh axes over which one of the operands holds partial sums."""
    arrays = [_array(a) for a in args]
    return frozenset().union(*(state_of(a).pending for a in arrays if isinstance(a, jax.Array)))


def _sum_of_pending(x, y, what: str):
    alike = isinstance(x, NamedArray) == isinstance(y, NamedArray) and _pending(x) == _pending(y)
    if not alike or _array(x).dtype == jnp.bool_ or (isinstance(x, NamedArray) and x.names != y.names):
        for a in (x, y):
            _refuse(a, f"{what}, with something that is not the same partial sum,")
    total = jnp.add(_array(x), _array(y))
    return NamedArray(total, x.names, x.slices) if isinstance(x, NamedArray) else total


def _scaled(x, factor, dtype=None):
    """Partial sums, in another dtype if one is given, times a factor, held as copies, as JAX's types require."""
    if getattr(factor, "ndim", 0) or _pending(factor):
        _refuse(x, "multiply, by something other than a number,")
    array, factor = _array(x), _array(factor)
    state = state_of(array)
    if array.dtype == jnp.bool_:
        _refuse(x, "multiply, of truths,")
    array = array if dtype is None else backend.to_type(array, dtype)
    if not hasattr(factor, "dtype"):  # a fraction makes floats of whole numbers
        with dtypes_of_jax((x, factor), "multiply"):
            array = backend.to_type(array, jnp.result_type(array, factor))
            factor = jnp.asarray(factor, array.dtype)
    factor = jnp.asarray(factor)
    if state.mode == "manual":
        factor = jax.lax.pcast(factor, tuple(state.pending), to="reduced")
    else:
        copies = spec_of([], (), state.pending)
        # For a value, its own mesh and not its type's: the factor is put on its devices.
        own = sharding_on(array, copies) if is_tracer(array) else jax.NamedSharding(array.sharding.mesh, copies)
        factor = jax.reshard(factor, own)
    return x.with_array(array * factor) if isinstance(x, NamedArray) else array * factor


def _refuse(x, what: str) -> None:
    if isinstance(x, NamedArray):
        return refuse_pending(x, what)
    if _pending(x):
        return refuse_pending(NamedArray(x, tuple(f"_{i}" for i in range(x.ndim))), what)
