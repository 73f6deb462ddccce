"""The leaves of a state under names that derive from their place in the tree: what a checkpoint stores.

On disk a name has slashes, as in model/blocks/mlp/up; people are shown model.blocks.mlp.up, as everywhere else.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from trellis.errors import UserError
from trellis.named import is_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One stored array: its values or its abstract form, and the names of its axes if it has names.

    `key_impl` names the generator of a typed random key; `leaf` is then the key's raw data (uint32).
    """

    leaf: Any
    names: tuple[str, ...] | None = None
    key_impl: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.leaf.shape)

    @property
    def is_stacked(self) -> bool:
        """Whether its first dimension counts layers."""
        return bool(self.names) and self.names[0] == "layers"

    def describe(self) -> dict:
        """The entry's line in a checkpoint's manifest."""
        line: dict = {"shape": list(self.shape), "dtype": str(self.leaf.dtype)}
        if self.names is not None:
            line["names"] = list(self.names)
        if self.key_impl is not None:
            line["key"] = self.key_impl
        return line


def entries(tree: Any) -> dict[str, Entry]:
    """Every leaf of `tree` by name, in the tree's order.

    A leaf is a `jax.Array`, a `jax.ShapeDtypeStruct`, or either inside a named array, whose axis names the entry keeps.
    Typed random keys become their raw data. `None` is not a leaf, nor are names around a tree without arrays.

    >>> list(entries({"params": {"w": jnp.zeros(2)}, "moments": [jnp.zeros(2), jnp.zeros(2)]}))
    ['moments/0', 'moments/1', 'params/w']
    """
    found: dict[str, Entry] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_named):
        if not jax.tree.leaves(leaf):
            continue
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "value"
        if name in found:
            raise UserError(
                "Two leaves of a state cannot have the same name.",
                seen=f"`{shown(name)}` twice",
                where="the state's tree of keys and fields",
                fix="rename the key that contains a slash",
            )
        names = tuple(leaf.names) if is_named(leaf) else None
        found[name] = _entry(name, leaf.array if is_named(leaf) else leaf, names)
    return found


def shown(name: str) -> str:
    """An entry's name as it is shown to people.

    >>> shown("model/blocks/mlp/up")
    'model.blocks.mlp.up'
    """
    return name.replace("/", ".")


def rebuild(tree: Any, arrays: dict[str, jax.Array]) -> Any:
    """`tree` with its leaves replaced by `arrays`, which are named as `entries(tree)` names them."""
    wanted = entries(tree)
    leaves = [_wrap(arrays[name], entry.key_impl) for name, entry in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _entry(name: str, leaf: Any, names: tuple[str, ...] | None) -> Entry:
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise UserError(
            "All leaves of a state must be arrays.",
            seen=f"{type(leaf).__name__} ({leaf!r:.60})",
            where=shown(name),
            fix="make it an array, or a static field, which is not a leaf",
        )
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return Entry(leaf=leaf, names=names)
    data, impl = _key_data(leaf)
    return Entry(leaf=data, names=names, key_impl=impl)


def _key_data(leaf: Any) -> tuple[Any, str]:
    """A typed key's raw data and the name of its generator; the data of an abstract key is abstract."""
    impl = []

    def read(key: jax.Array) -> jax.Array:
        impl.append(str(jax.random.key_impl(key)))
        return jax.random.key_data(key)

    shape = jax.eval_shape(read, leaf)
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf), impl[0]
    # Raw data has one more dimension than the key, at the end, and it stays whole: the key's spec still fits.
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=getattr(leaf, "sharding", None)), impl[0]


def _wrap(array: jax.Array, key_impl: str | None) -> jax.Array:
    return array if key_impl is None else jax.random.wrap_key_data(array, impl=key_impl)
