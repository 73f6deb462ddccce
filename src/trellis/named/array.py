"""A named array: a `jax.Array` and a tuple of axis names."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np

from trellis.named.axis import Axis, NamesError
from trellis.notation import Dim, Shape, parse, typeof
from trellis.notation.state import state_of

Slices = tuple[tuple[str, ...], ...]


@jax.tree_util.register_pytree_with_keys_class
class NamedArray:
    """A `jax.Array` whose dimensions have names.

    Operations go by name and broadcast by name; the sharding is the one in the
    array's JAX type. In manual mode (`shard_map`) the array is one device's
    slice, and `slices` says over which mesh axes each dimension is sliced, so
    that `shape` and `typeof` still give the whole sizes.

    Attributes:
        array: the data.
        names: one name for each dimension.
        slices: manual mode: the mesh axes of each dimension; empty otherwise.
    """

    __slots__ = ("array", "names", "slices", "_placed")

    def __init__(self, array, names: tuple[str, ...], slices: Slices = ()):
        self.array = array
        self.names = names
        self.slices = slices
        self._placed: dict | None = None

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("array"), self.array),), (self.names, self.slices)

    def tree_flatten(self):
        return (self.array,), (self.names, self.slices)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(children[0], *static)

    # What it is.

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes, with their whole sizes."""
        return tuple(Axis(name, size) for name, size in self.shape.items())

    @property
    def shape(self) -> dict[str, int]:
        """Names to whole sizes, in order."""
        if not self.slices:
            return dict(zip(self.names, self.array.shape, strict=True))
        mesh = jax.sharding.get_abstract_mesh()
        # Over axes that are left to the surrounding program the array seen here is whole.
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
        return math.prod(self.shape.values())

    def axis(self, name: str) -> Axis:
        """The axis of that name.

        Raises:
            NamesError: there is none.
        """
        return Axis(name, self.shape[self.names[self.index(name)]])

    def index(self, name: str) -> int:
        """The position of a name.

        Raises:
            NamesError: there is none.
        """
        if name not in self.names:
            raise NamesError(
                f"no dimension '{name}', got {typeof(self)}: its names are {', '.join(self.names) or 'none'}"
            )
        return self.names.index(name)

    def with_array(self, array, after: Shape | None = None) -> "NamedArray":
        """The same names on another array (`after` says how a manual-mode array is sliced now)."""
        slices = tuple(dim.axes for dim in after.dims) if after is not None and self.slices else self.slices
        return NamedArray(array, self.names, slices)

    def item(self):
        """The value of a scalar."""
        return self.array.item()

    def __repr__(self) -> str:
        if isinstance(self.array, jax.Array | np.ndarray) and not isinstance(self.array, jax.core.Tracer):
            return f"{typeof(self)}\n{self.array}"
        return typeof(self)

    def __bool__(self):
        return bool(self.array)

    def __float__(self):
        return float(self.array)

    def __int__(self):
        return int(self.array)

    def __iter__(self):
        raise TypeError(f"a named array is not iterated by position, got {typeof(self)}: use x.unbind(name)")

    # Operators and methods are attached by the tables in operators.py.
    __hash__ = None
    __array_priority__ = 1000


def named(array, names: str | tuple[str, ...]) -> NamedArray:
    """Gives names to the dimensions of an array.

    >>> named(jnp.zeros((2, 3)), "batch embed").shape
    {'batch': 2, 'embed': 3}

    Args:
        array: anything that `jnp.asarray` takes.
        names: the names, or a shape in the notation without mesh axes.

    Raises:
        NamesError: a name is repeated, or their number is not the rank.
    """
    if isinstance(names, str):
        names = tuple(str(dim.name) for dim in parse(names).dims)
    if not hasattr(array, "dtype"):
        array = jnp.asarray(array)
    if repeated := [n for n, count in collections.Counter(names).items() if count > 1]:
        raise NamesError(f"a name stands for one dimension, got '{' '.join(names)}': rename the second '{repeated[0]}'")
    if len(names) != len(array.shape):
        raise NamesError(
            f"an array has one name for each dimension, got {len(names)} names '{' '.join(names)}' "
            f"for shape {tuple(array.shape)}: add or remove names"
        )
    return NamedArray(array, tuple(names))


def is_named(x) -> bool:
    """Whether `x` is a named array (the `is_leaf` for trees of them)."""
    return isinstance(x, NamedArray)
