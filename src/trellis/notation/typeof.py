"""Types in the notation, for people: `f32[batch/data=8 pos=32 embed=64 +model]`."""

import jax
import numpy as np

from trellis.notation.shape import Dim
from trellis.notation.state import mesh_of, state_of

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def short_dtype(dtype) -> str:
    """The notation's name of a dtype.

    >>> short_dtype("float32"), short_dtype("bfloat16"), short_dtype("bool"), short_dtype("uint8")
    ('f32', 'bf16', 'bool_', 'u8')
    """
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return "key"
    name = np.dtype(dtype).name
    if name == "bool":
        return "bool_"
    kind = name.rstrip("0123456789")
    if kind in _SHORT:
        return _SHORT[kind] + name[len(kind) :]
    return name.replace("float", "f", 1)


def is_named(x) -> bool:
    """Whether `x` is a named array: anything with `.array` and `.names`."""
    return hasattr(x, "array") and hasattr(x, "names")


def is_array(x) -> bool:
    """Whether `x` has a shape and a dtype, or is a named array."""
    return is_named(x) or (hasattr(x, "shape") and hasattr(x, "dtype"))


def axes_of(x) -> tuple[tuple[str, ...], ...]:
    """For each dimension of a plain or named array, the mesh axes known to slice it."""
    axes = state_of(x.array if is_named(x) else x).axes
    dims = getattr(x, "dims", None)
    if dims is None:
        return axes
    # Manual mode: the named array remembers what the type of its slice cannot say.
    return tuple(dim.axes or mine for dim, mine in zip(dims, axes, strict=True))


def typeof(x) -> str:
    """The whole type of a plain or named array.

    Sizes are those of the whole array, in every mode. A slice in manual mode
    that carries no names prints its own sizes and the mesh axes it differs over.

    >>> typeof(np.zeros((2, 3), np.float32))
    'f32[2 3]'

    Args:
        x: an array, a tracer, a `jax.ShapeDtypeStruct`, a named array, or a
            Python number.
    """
    if not is_array(x):
        if isinstance(x, bool | int | float | complex):
            return f"{type(x).__name__}[]"
        return type(x).__name__
    array = x.array if is_named(x) else x
    if not is_array(array):  # a named array whose leaf was replaced, as tree transformations do
        return f"{type(array).__name__}[{' '.join(map(str, x.names))}]"
    shape = f"{short_dtype(array.dtype)}["
    if not isinstance(array, jax.Array | jax.ShapeDtypeStruct):
        names = x.names if is_named(x) else (None,) * len(array.shape)
        return shape + " ".join(_dim(n, (), s) for n, s in zip(names, array.shape, strict=True)) + "]"
    state, mesh = state_of(array), mesh_of(array)
    # A manual axis divides the array that is seen; the type keeps the whole size.
    parts = {a: n for a, n in mesh.shape.items() if a in mesh.manual_axes} if state.mode == "manual" else {}
    axes = axes_of(x)
    names = x.names if is_named(x) else (None,) * len(array.shape)
    words = []
    known: set[str] = set()
    for name, mine, size in zip(names, axes, array.shape, strict=True):
        for axis in mine:
            known.add(axis)
            size *= parts.get(axis, 1)
        words.append(_dim(name, mine, size))
    words += [f"+{a}" for a in sorted(state.pending)] + [f"~{a}" for a in sorted(state.copied)]
    unknown = sorted(state.varying - known)
    return shape + " ".join(words) + "]" + (f" (one slice; differs over {', '.join(unknown)})" if unknown else "")


def _dim(name, axes, size) -> str:
    if name is None or isinstance(name, int):
        return str(Dim(size, axes))
    return f"{Dim(name, axes)}={size}"
