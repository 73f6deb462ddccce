"""`while_loop` and `cond`: values decide what is computed, on all devices alike."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trellis.mesh.reshard import place
from trellis.named.arguments import function_of, shown
from trellis.named.array import is_named
from trellis.named.axis import NamesError
from trellis.named.carry import Elsewhere, check_carry, pinned, told
from trellis.named.mapped import entered, only_arrays
from trellis.named.operand import operand
from trellis.notation import TypeMismatch, typeof
from trellis.notation.state import state_of


def while_loop(cond_fun: Callable, body_fun: Callable, init):
    """`jax.lax.while_loop` of a tree of named and plain arrays: runs the body while the condition holds.

    The carry starts with the sharding that the body gives it. A loop that ends by a condition has no reverse-mode
    gradient; one of a fixed length has (`scan`, `fold`, with `where` for what is done).

    >>> from trellis.named import named
    >>> import jax.numpy as jnp
    >>> small = lambda x: (x * x).sum() < 100.0
    >>> print(while_loop(small, lambda x: 2 * x, named(jnp.array([1.0, 2.0]), "embed")).tolist())
    [8.0, 16.0]

    Args:
        cond_fun: takes what is carried, and gives one boolean: a named array without names, or a plain one.
        body_fun: gives what it takes, with the names, sizes and dtypes.
        init: the first carry.

    Raises:
        NamesError: the condition is no boolean, or more than one.
        PendingSumError: the condition is a partial sum.
        TypeMismatch: the body gives another carry than it takes.
    """
    for fn in (cond_fun, body_fun):
        function_of(fn, "while_loop", "write while_loop(lambda x: x.sum() < 1.0, lambda x: 2 * x, x)")
    where = f"the while_loop of `{getattr(body_fun, '__name__', 'the body')}`"

    def body(carry):
        carry = pinned(carry)
        new = entered(only_arrays(body_fun(carry), "while_loop"), "while_loop", copies=False)
        check_carry(carry, new, where, body)
        return pinned(new)

    goes_on = lambda carry: _choice(cond_fun(pinned(carry)), "while_loop")
    carry = entered(only_arrays(init, "while_loop"), "while_loop", copies=False, numbers=True)
    try:
        return jax.lax.while_loop(goes_on, body, carry)
    except Elsewhere as elsewhere:
        if elsewhere.body is not body:  # of another loop, inside this one
            raise
        return jax.lax.while_loop(goes_on, body, elsewhere.moved(carry))


def cond(pred, true_fun: Callable, false_fun: Callable, *operands):
    """`jax.lax.cond` on named and plain arrays: one of two functions, by a boolean that is the same on all devices.

    Both results are sharded as that of `true_fun` is, without partial sums and copies. To choose for each element, use
    `where`.

    >>> from trellis.named import named
    >>> import jax.numpy as jnp
    >>> x = named(jnp.array([3.0, -4.0]), "embed")
    >>> print(cond(x.sum() > 0, lambda x: x, lambda x: -x, x).tolist())
    [-3.0, 4.0]

    Args:
        pred: one boolean, a named array without names or a plain one.
        true_fun: the function of the operands to run if it is true.
        false_fun: the one to run if it is not, with results of the same names, sizes and dtypes.
        operands: trees of arrays.

    Raises:
        NamesError: it is no boolean, or more than one.
        PendingSumError: it is a partial sum.
        TypeMismatch: the functions give other structures, names, sizes or dtypes.
    """
    for fn in (true_fun, false_fun):
        function_of(fn, "cond", "write cond(x.sum() > 0, lambda x: x, lambda x: -x, x)")
    first: list[tuple] = []  # the structure and kinds of the results of the function that is traced first

    def branch(fn: Callable) -> Callable:
        def run(operands):
            out = entered(only_arrays(fn(*pinned(operands)), "cond"), "cond", copies=False)
            leaves, structure = jax.tree.flatten(out, is_leaf=is_named)
            settled = [_placed(x, state_of(x.array if is_named(x) else jnp.asarray(x)).axes) for x in leaves]
            first.append((structure, [_kind(x) for x in settled]))
            return structure.unflatten(_like(settled, structure, *first[0]))

        return run

    operands = entered(only_arrays(operands, "cond"), "cond", copies=False, numbers=True)
    return jax.lax.cond(_choice(pred, "cond"), branch(true_fun), branch(false_fun), operands)


def _choice(pred, what: str):
    """One boolean, as JAX wants it."""
    array = pred
    if is_named(pred):
        pred = operand(pred, what)
        array = pred.array
    if getattr(array, "ndim", 0):
        raise NamesError(
            f"a condition must be a single boolean, got {typeof(pred)}, in {what}: reduce it with .all() or .any(), "
            "or choose for each element with where(...)"
        )
    if not isinstance(array, bool) and getattr(array, "dtype", None) != jnp.bool_:
        raise NamesError(f"a condition must be a single boolean, got {shown(pred)}, in {what}: compare it, as in x > 0")
    return array


def _placed(x, axes):
    """A result at these mesh axes, no partial sum."""
    array = x.array if is_named(x) else jnp.asarray(x)
    state = state_of(array)
    if state.mode == "explicit" and (state.axes != axes or state.pending):
        array = place(array, axes, names=x.names if is_named(x) else None)
    return x.with_array(array) if is_named(x) else array


class _Kind(NamedTuple):
    """What both results have alike, the type as text, and the mesh axes."""

    alike: tuple
    text: str
    axes: tuple


def _kind(x) -> _Kind:
    array = x.array if is_named(x) else x
    alike = ((x.names, x.slices) if is_named(x) else None, array.shape, array.dtype)
    return _Kind(alike, told(x), state_of(array).axes)


def _like(leaves: list, structure, wanted, kinds: list[_Kind]) -> list:
    """The results of one function, placed as the other's are.

    Raises:
        TypeMismatch: they are not of one structure, or not of the same names, sizes and dtypes.
    """
    bare = [jax.tree.structure(s.unflatten([0] * s.num_leaves)) for s in (wanted, structure)]
    if bare[0] != bare[1]:
        raise TypeMismatch(
            f"both functions of a cond must return the same structure, got {bare[0]} and {bare[1]}, in cond: return "
            "the same tree from both"
        )
    for x, kind in zip(leaves, kinds, strict=True):
        if _kind(x).alike != kind.alike:
            raise TypeMismatch(
                f"both functions of a cond must return the same names, sizes and dtypes, got {kind.text} and "
                f"{told(x)}, in cond: rename, transpose or cast one of them"
            )
    return [_placed(x, kind.axes) for x, kind in zip(leaves, kinds, strict=True)]
