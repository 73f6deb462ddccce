"""A named array: a `jax.Array` and a tuple of axis names."""

import contextlib
import contextvars
import copy
import math
import typing
from collections.abc import Generator

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from trellis._compat import is_tracer
from trellis.mesh.dealing import undealt
from trellis.mesh.layout import POSITIONS, current_layout, is_dealt
from trellis.mesh.manual.ops import vary
from trellis.mesh.meshes import MeshError
from trellis.named.arguments import names_of
from trellis.named.arguments import shown as argument
from trellis.named.axis import Axis, Name, Names, NamesError, name_of, once
from trellis.named.methods import Methods
from trellis.named.part_size import PartSize, as_seen
from trellis.notation import Dim, PendingSumError, Shape, TypeMismatch, parse, typeof
from trellis.notation.state import mode_of, state_of
from trellis.notation.typeof import is_array

Slices = tuple[tuple[str, ...], ...]

# The named arrays that something has used, while somebody asks (`reads`), each with what read it, if that is known.
_reads: contextvars.ContextVar["list[tuple[NamedArray, str]] | None"] = contextvars.ContextVar("reads", default=None)
# One entry for each that asks now, in any thread: so that it costs no call where nobody does.
asking: list[None] = []
_anew = jax.make_user_context(None)


@jax.tree_util.register_pytree_with_keys_class
class NamedArray(Methods):
    """A `jax.Array` whose dimensions have names.

    Operations go by name and broadcast by name; the sharding is the one in the
    array's JAX type. In manual mode (`shard_map`) the array is one device's
    slice, and `slices` says over which mesh axes each dimension is sliced, so
    that `shape` and `typeof` still give the whole sizes.

    A named array is a tree of one leaf, so JAX's transformations, Equinox and Optax take it as it is. They may put
    anything in the place of the array; an operation that uses it checks the names against the rank.

    Attributes:
        array: the data.
        names: one name for each dimension.
        slices: manual mode: the mesh axes of each dimension; empty otherwise.

    Raises:
        NamesError: a name stands twice, or the names are not as many as the array's dimensions.
    """

    __slots__ = ("array", "names", "slices")

    array: typing.Any
    names: tuple[str, ...]
    slices: Slices

    def __init__(self, array, names: tuple[str, ...], slices: Slices = ()):
        if len(set(names)) < len(names):
            once(names, "NamedArray")
        if getattr(array, "ndim", len(names)) != len(names):
            raise NamesError(
                f"an array must have one name for each dimension, got {len(names)} names "
                f"'{' '.join(map(str, names))}' for {typeof(array)}, in NamedArray: add or remove names"
            )
        self.array = array
        self.names = names
        self.slices = slices

    def tree_flatten_with_keys(self):
        if asking:
            notice(self)
        return ((jax.tree_util.GetAttrKey("array"), self.array),), (self.names, self.slices)

    def tree_flatten(self):
        if asking:
            notice(self)
        return (self.array,), (self.names, self.slices)

    @classmethod
    def tree_unflatten(cls, static, children):
        new = object.__new__(cls)
        (new.array,), (new.names, new.slices) = children, static
        return new

    # What it is.

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes, with their whole sizes."""
        return tuple(Axis(name, size) for name, size in as_seen(self.shape).items())

    @property
    def shape(self) -> dict[str, int]:
        """Names to whole sizes, in order."""
        check_rank(self, "its shape")
        if not self.slices:
            return as_seen(dict(zip(self.names, self.array.shape, strict=True)))
        mesh = jax.sharding.get_abstract_mesh()
        # Over axes that are left to the surrounding program, the array seen here is whole.
        parts = [math.prod(mesh.shape[a] for a in axes if a in mesh.manual_axes) for axes in self.slices]
        return {n: s * p for n, s, p in zip(self.names, self.array.shape, parts, strict=True)}

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The dimensions with the mesh axes that slice them."""
        axes = self.slices or state_of(self.array).axes
        return tuple(map(Dim, self.names, axes))

    @property
    def type(self) -> Shape:
        """The names, shardings and states, in the notation."""
        state = state_of(self.array)
        return Shape(self.dims, tuple(sorted(state.pending)), tuple(sorted(state.copied)))

    @property
    def dtype(self):
        return self.array.dtype

    @property
    def ndim(self) -> int:
        return len(self.names)

    @property
    def size(self) -> int:
        """The number of elements of the whole array."""
        whole = math.prod(self.shape.values())
        seen = as_seen(dict.fromkeys(self.names, whole)).values()
        return next((size for size in seen if isinstance(size, PartSize)), whole)

    def axis(self, name: Name) -> Axis:
        """The axis of that name.

        Raises:
            NamesError: there is none.
        """
        i = self.index(name)
        ((name, size),) = as_seen({self.names[i]: self.shape[self.names[i]]}).items()
        return Axis(name, size)

    def index(self, name: Name) -> int:
        """The position of a name. An `Axis` must have the dimension's size.

        Raises:
            NamesError: there is none, or it has another size.
        """
        wanted = name.name if isinstance(name, Axis) else name
        if not isinstance(wanted, str):
            raise NamesError(
                f"a dimension must be given by its name, got {wanted!r} for {typeof(self)}, whose names are "
                f"{', '.join(self.names) or 'none'}: pass one of these"
            )
        if wanted not in self.names:
            raise NamesError(
                f"no dimension '{wanted}', got {typeof(self)}: its names are {', '.join(self.names) or 'none'}"
            )
        if isinstance(name, Axis) and self.shape[wanted] != name.size:
            raise NamesError(
                f"a name must have one size in an operation, got {name} and {wanted}={self.shape[wanted]} in "
                f"{typeof(self)}: pass the name, or an axis of that size"
            )
        return self.names.index(wanted)

    def with_array(self, array, after: Shape | None = None) -> "NamedArray":
        """The same names on another array (`after` says how a manual-mode array is sliced now)."""
        if asking:
            notice(self)
        slices = tuple(dim.axes for dim in after.dims) if after is not None and self.slices else self.slices
        return NamedArray(array, self.names, slices)

    # As a value: what Python, NumPy and people ask of an array.

    def item(self):
        """The value of a scalar, as a Python number."""
        return known(self, "item()").item()

    def tolist(self):
        """The values as nested lists of Python numbers."""
        return np.asarray(self).tolist()

    def block_until_ready(self) -> "NamedArray":
        """This array, once its values are computed."""
        jax.block_until_ready(self.array)
        return self

    def __array__(self, dtype=None, copy=None):
        array = in_natural_order(self, known(self, "np.asarray"))
        if self.slices == () and 0 in array.shape and isinstance(array, jax.Array) and not is_tracer(array):
            return np.zeros(array.shape, dtype or array.dtype)  # JAX 0.10.2 cannot fetch a sliced array of no elements
        return np.array(array, dtype=dtype) if copy else np.asarray(array, dtype)

    # NumPy leaves `numpy_array * named_array` to this class, which says how to name the first.
    __array_priority__ = 1000

    def __repr__(self) -> str:
        return shown(self)

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        if self.names:
            raise NamesError(
                f"only a scalar can be formatted, got '{spec}' for {typeof(self)}: select one number, or format "
                "np.asarray(x)"
            )
        return format(self.item(), spec)

    def __bool__(self):
        return bool(known(self, "bool()"))

    def __float__(self):
        return float(known(self, "float()"))

    def __int__(self):
        return int(known(self, "int()"))

    def __index__(self):
        return known(self, "an index").__index__()

    def __iter__(self):
        raise TypeMismatch(f"a named array cannot be iterated by position, got {typeof(self)}: use x.unbind(name)")

    def __matmul__(self, other):
        raise _says_no_sum(self, other)

    def __rmatmul__(self, other):
        raise _says_no_sum(other, self)

    def __reduce__(self):
        dealt = isinstance(self.array, jax.Array) and _dealt_dims(self)
        return NamedArray, (np.asarray(self) if dealt else self.array, self.names, self.slices)

    def __copy__(self) -> "NamedArray":
        return NamedArray.tree_unflatten((self.names, self.slices), (self.array,))

    def __deepcopy__(self, memo) -> "NamedArray":
        return NamedArray.tree_unflatten((self.names, self.slices), (copy.deepcopy(self.array, memo),))

    __hash__ = None  # type: ignore[assignment]


def _says_no_sum(one, other) -> TypeMismatch:
    return TypeMismatch(
        f"a product of named arrays says what it sums, got {typeof(one)} @ {typeof(other)}: write "
        "tr.dot(x, w, over='embed')"
    )


def named(array, names: Names) -> NamedArray:
    """Gives names to the dimensions of an array.

    >>> named(jnp.zeros((2, 3)), "batch embed").shape
    {'batch': 2, 'embed': 3}

    Args:
        array: anything that `jnp.asarray` takes.
        names: a shape in the notation, names, or axes, whose sizes are checked. In manual mode the text may say which
            mesh axes slice the array, `"batch/data embed"`: then it is one device's slice.

    Raises:
        NamesError: a name is repeated or of another size, their number is not the rank, or the array has names.
    """
    if isinstance(array, NamedArray):
        raise NamesError(f"an array can be named only once, got {typeof(array)}, in named: use rename")
    fix = "write named(array, 'batch embed')"
    if not hasattr(array, "dtype"):
        if isinstance(array, str) or array is None:
            raise NamesError(f"named takes an array, got {argument(array)}, in named: {fix}")
        array = jnp.asarray(array)
    dims = parse(names).dims if isinstance(names, str) else ()
    if isinstance(names, str) and parse(names) != Shape(dims):
        raise NamesError(
            f"named takes the names of dimensions only, got '{names}', in named: leave out states and '...'"
        )
    entries = [d.name for d in dims] if isinstance(names, str) else names_of(names, "named", fix)
    words = tuple(e.name if isinstance(e, Axis) else e for e in entries)
    if wrong := [w for w in words if not isinstance(w, str)]:
        raise NamesError(f"a dimension must have a name, got {wrong[0]!r}, in named: write a word")
    words = tuple(str(name_of(word, "named")) for word in words)
    if repeated := [n for n in words if words.count(n) > 1]:
        raise NamesError(
            f"a name must stand for one dimension only, got '{' '.join(words)}': rename the second '{repeated[0]}'"
        )
    if len(words) != len(array.shape):
        raise NamesError(
            f"an array must have one name for each dimension, got {len(words)} names '{' '.join(words)}' for shape "
            f"{tuple(array.shape)}: add or remove names"
        )
    if POSITIONS in words:
        _refuse_unknown_order(array, words)
    new = _sliced(array, words, dims) if any(dim.axes for dim in dims) else NamedArray(array, words)
    for entry in entries:
        if isinstance(entry, Axis):
            new.index(entry)
    return new


def _refuse_unknown_order(array, names: tuple[str, ...]) -> None:
    """Refuses an array whose order of positions is unknown, where they are dealt out (`Layout.dealt`). An array that
    JAX made is in natural order; one taken out of a named array is dealt out. The latter is in slices; a whole one may
    be either, and so may any on a mesh in auto mode, whose types do not say.

    Raises:
        NamesError: it cannot be told.
    """
    if not is_dealt(POSITIONS) or not isinstance(array, jax.Array):
        return
    state = state_of(array)
    if state.mode not in ("explicit", "auto"):
        return
    if state.mode == "explicit" and set(state.axes[names.index(POSITIONS)]) & set(current_layout().dealt):
        return
    raise NamesError(
        "positions are dealt out over devices here, so the order of an array's positions must be known, got "
        f"{typeof(array)} named '{' '.join(names)}': make it by name from arange(pos), from NumPy, or inside "
        "trellis.in_order(f, x)"
    )


def _sliced(array, names: tuple[str, ...], dims: tuple[Dim, ...]) -> NamedArray:
    """One device's slice, in manual mode."""
    mesh = jax.sharding.get_abstract_mesh()
    written = " ".join(map(str, dims))
    if mode_of(mesh) != "manual":
        raise NamesError(
            f"mesh axes can only be written in manual mode, got mesh axes in '{written}', in named: write names only "
            "(elsewhere an array carries its own sharding)"
        )
    axes = tuple(a for dim in dims for a in dim.axes)
    if unknown := [a for a in axes if a not in mesh.manual_axes]:
        raise NamesError(
            f"a dimension can only be a slice over manual mesh axes, got '{unknown[0]}' in '{written}', where "
            f"{', '.join(mesh.manual_axes)} are manual, in named: use one of these"
        )
    slices = tuple(tuple(a for a in dim.axes if mesh.shape[a] > 1) for dim in dims)
    return NamedArray(vary(array, tuple(a for mine in slices for a in mine)), names, slices if any(slices) else ())


def is_named(x) -> bool:
    """Whether `x` is a named array (the `is_leaf` for trees of them)."""
    return isinstance(x, NamedArray)


def traced_anew():
    """Within it, JAX traces jitted functions anew, and not again after it what it has traced there."""
    return _anew(object())


@contextlib.contextmanager
def reads() -> Generator[list[tuple[NamedArray, str]]]:
    """Collects the named arrays that are used within, each with the operation, or '' for one that is only passed on."""
    found: list[tuple[NamedArray, str]] = []
    before = _reads.set(found)
    asking.append(None)
    try:
        with traced_anew():  # in what was traced before nothing would be noticed
            yield found
    finally:
        asking.pop()
        _reads.reset(before)


def notice(x: NamedArray, what: str = "") -> None:
    """Notes for `reads` that an operation reads this array, or that it is passed on to something else."""
    if (found := _reads.get()) is not None:
        found.append((x, what))


def holds_none(x: NamedArray) -> bool:
    """Whether there is a tree without arrays in the array's place, as Optax puts one where a rule is masked."""
    return not jax.tree.leaves(x)


def check_rank(x: NamedArray, what: str) -> None:
    """Checks the names against the array's rank: JAX's transformations remove dimensions and know nothing of names.

    Raises:
        NamesError: the array has another number of dimensions than names, or there is no array.
    """
    if not is_array(x.array) or isinstance(x.array, NamedArray):
        raise NamesError(
            f"a named array must hold an array, got {shown(x)}, in {what}: look for a transformation that put "
            "something else in its place"
        )
    if len(x.array.shape) != len(x.names):
        raise NamesError(
            f"a named array must have one name for each dimension, got {len(x.names)} names '{' '.join(x.names)}' for "
            f"{typeof(x.array)}, in {what}: use trellis.vmap and trellis.scan, since jax.vmap and jax.lax.scan know "
            "no names; trellis.optim.on_arrays for an optimizer that keeps arrays of other shapes"
        )


def known(x: NamedArray, what: str):
    """The array, for Python to see its values.

    Raises:
        PendingSumError: partial sums of it are pending.
        MeshError: other processes have a part of it.
    """
    check_rank(x, what)
    if asking:
        notice(x, what)
    if state_of(x.array).pending:
        settled = Shape(x.type.dims, (), x.type.copied)
        raise PendingSumError(
            f'only settled values can be read, got {typeof(x)}, in {what}: write reshard("{x.type} -> {settled}", x), '
            "or settle(x)"
        )
    if isinstance(x.array, jax.Array) and not is_tracer(x.array) and not x.array.is_fully_addressable:
        if not x.array.is_fully_replicated:
            whole = Shape(tuple(Dim(dim.name) for dim in x.type.dims), (), x.type.copied)
            raise MeshError(
                f"values of which other processes have a part cannot be read, got {typeof(x)}, in {what}: gather them "
                f'first, in all processes, with reshard("{x.type} -> {whole}", x)'
            )
    return x.array


def in_natural_order(x: NamedArray, array):
    """Values that leave for the host: positions that the layout in force deals out, back in their own order."""
    for dim in _dealt_dims(x) if array.size else ():
        array = undealt(np.asarray(array), current_layout().slices_dealt, dim)
    return array


def _dealt_dims(x: NamedArray) -> list[int]:
    """The dimensions along which an array on the mesh has its positions dealt out."""
    dims = [dim for dim, name in enumerate(x.names) if is_dealt(name)]
    return [] if not dims or jax.typeof(x.array).sharding.mesh.empty else dims


def shown(x: NamedArray) -> str:
    """The type, and the values if there are any to see. Never fails."""
    try:
        text = typeof(x)
    except Exception:
        text = f"{type(x.array).__name__}[{' '.join(map(str, x.names))}]"
    if isinstance(x.array, Tracer):
        return text if x.names else f"{text} (a named array: its `.array` is JAX's scalar)"
    try:
        if not isinstance(x.array, jax.Array | np.ndarray):
            return text
        return f"{text}\n{in_natural_order(x, known(x, 'printing'))}"
    except Exception:
        return text
