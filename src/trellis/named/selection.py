"""What an index says, read in one place for reading and updates: `x["pos", 3, "batch", ids]`.

One rule holds for positions, on every layout: they count from 0, negative ones from the end. A position that is known
while tracing (a number, a list, a NumPy array) is refused if it is out of range. One that is a value of the program (a
JAX array) then reads zeros, and writes nothing.
"""

import operator

import jax
import jax.numpy as jnp
import numpy as np

from trellis._compat import is_tracer
from trellis.named.array import NamedArray, check_rank
from trellis.named.axis import NamesError
from trellis.named.operand import operand, refuse_cut, refuse_dealt, refuse_pending
from trellis.notation import typeof

Selector = int | slice | NamedArray


def selection(x: NamedArray, key, what: str) -> dict[str, Selector]:
    """Reads `x["pos", 3]`, `x["pos", 3, "batch", 1:2]` and `x[{"pos": 3}]`.

    Returns:
        For each name an integer from 0 on, a slice, or a named array of positions. Positions without a name stand
        along the dimension that they select from, and have its name.

    Raises:
        NamesError: a name is absent or written twice, or a position is outside or none.
    """
    if isinstance(key, dict):
        pairs = list(key.items())
    elif isinstance(key, tuple) and key and len(key) % 2 == 0:
        pairs = list(zip(key[::2], key[1::2], strict=True))
    else:
        raise NamesError(
            f'a named array must be indexed by name, got [{key!r}] for {typeof(x)}: write x["pos", 3], x["pos", 2:5] '
            'or x[{"pos": ids}]'
        )
    found: dict[str, Selector] = {}
    for name, value in pairs:
        name = x.names[x.index(name)]
        if name in found:
            raise NamesError(
                f"an index can have each name only once, got '{name}' twice for {typeof(x)}, in {what}: index twice"
            )
        found[name] = selector(x, name, value, what)
    refuse_cut(found, what)
    return found


def selector(x: NamedArray, name: str, value, what: str) -> Selector:
    """Reads what one dimension is indexed with."""
    refuse_dealt((name,), what, x)
    if isinstance(value, NamedArray):
        check_rank(value, f"the positions of {what}")
        refuse_pending(value, f"the positions of {what}")
        if value.dtype == jnp.bool_:
            if value.names != (name,):
                raise _wrong(
                    x,
                    name,
                    value,
                    f"a mask must have one name, that of the dimension, '{name}'",
                    what,
                    "rename the mask",
                )
            return _where(x, name, value.array, what)
        return _integers(x, name, value, what)
    if isinstance(value, slice):
        return _slice(x, name, value, what)
    if isinstance(value, list | tuple | range):
        value = np.asarray(value, np.int32 if not len(value) else None)
    if isinstance(value, np.ndarray | np.generic | jax.Array) and value.ndim:
        if value.ndim > 1:
            raise _wrong(
                x, name, value, "positions of several dimensions must have names", what, "use named(ids, '...')"
            )
        if value.dtype == bool:
            return _where(x, name, value, what)
        return _integers(x, name, NamedArray(value, (name,)), what)
    if isinstance(value, jax.Array) and (is_tracer(value) or not jnp.issubdtype(value.dtype, jnp.integer)):
        return _integers(x, name, NamedArray(value, ()), what)
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        fix = "pass a number, a slice, a list, an array of whole numbers, or a mask"
        raise _wrong(x, name, value, "a position must be a whole number", what, fix)
    return _inside(x, name, operator.index(value), what)


def _inside(x: NamedArray, name: str, position: int, what: str) -> int:
    size = x.shape[name]
    if not -size <= position < size:
        raise NamesError(
            f"a position must be inside its dimension, got {name}[{position}] for {typeof(x)}, in {what}: use {-size} "
            f"to {size - 1}"
        )
    return position % size


def _slice(x: NamedArray, name: str, value: slice, what: str) -> slice:
    try:
        start, stop, step = value.indices(x.shape[name])
    except (TypeError, ValueError) as error:
        fix = "use take with start + arange(...) if the start is a value of the program, and a step other than 0"
        raise _wrong(x, name, value, "a slice needs known whole numbers and a step other than 0", what, fix) from error
    count = len(range(start, stop, step))
    return slice(start, start + (count - 1) * step + (1 if step > 0 else -1), step) if count else slice(0, 0, 1)


def _integers(x: NamedArray, name: str, ids: NamedArray, what: str) -> NamedArray:
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise _wrong(x, name, ids, "positions must be whole numbers", what, "use .astype('int32')")
    if isinstance(ids.array, np.ndarray):
        if outside := [i for i in ids.array.ravel().tolist() if not -x.shape[name] <= i < x.shape[name]]:
            _inside(x, name, outside[0], what)
        return NamedArray(ids.array.astype(np.int32), ids.names)
    if ids.dtype.itemsize < 4:  # JAX counts negative ones from the end in their own type, which may overflow
        ids = ids.with_array(ids.array.astype(jnp.int32))
    return ids


def on_mesh(ids: NamedArray, name: str, what: str) -> NamedArray:
    """Positions as an operation takes them; along the dimension that they select from they are whole on each device."""
    if ids.names != (name,):
        return operand(ids, what)
    return NamedArray(jnp.asarray(ids.array), ids.names) if isinstance(ids.array, np.ndarray) else ids


def _where(x: NamedArray, name: str, mask, what: str) -> NamedArray:
    """The positions where a mask is true."""
    if mask.shape != (x.shape[name],):
        fix = f"compare along '{name}'"
        raise _wrong(x, name, mask, "a mask must have the size of the dimension that it selects from", what, fix)
    if is_tracer(mask):
        fix = f"use where(mask, x, 0), or x.sum('{name}', where=mask), or select outside of jit"
        raise _wrong(
            x, name, mask, "a mask can select only outside of jit, where the number of results is known", what, fix
        )
    return NamedArray(np.flatnonzero(np.asarray(mask)).astype(np.int32), (name,))


def _wrong(x: NamedArray, name: str, value, rule: str, what: str, fix: str) -> NamesError:
    seen = typeof(value) if hasattr(value, "dtype") else repr(value)
    return NamesError(f"{rule}, got {name}[{seen}] for {typeof(x)}, in {what}: {fix}")
