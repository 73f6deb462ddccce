"""`vmap`, `scan`, `fold` and `map` over a name."""

import jax
import jax.numpy as jnp

from trellis.named.array import NamedArray, is_named
from trellis.named.axis import Axis, NamesError
from trellis.named.index import positions
from trellis.named.placing import whole
from trellis.notation.state import mode_of


def _length(tree, name: str, what: str) -> int:
    sizes = {x.shape[name] for x in _named_leaves(tree) if name in x.names}
    if len(sizes) != 1:
        seen = f"sizes {sorted(sizes)}" if sizes else "no array with it"
        raise NamesError(
            f"{what} goes along one dimension, got {seen} for '{name}': pass arrays that have '{name}', of one size"
        )
    return sizes.pop()


def _named_leaves(tree):
    return [x for x in jax.tree.leaves(tree, is_leaf=is_named) if is_named(x)]


def _front(tree, name: str):
    """Moves `name` to the front of every array that has it, and takes the name off."""

    def lead(x):
        if is_named(x) and name in x.names:
            i = x.index(name)
            x = x.transpose((name, *(n for n in x.names if n != name))) if i else x
            return _Mapped(NamedArray(x.array, x.names[1:], x.slices[1:]))
        return x

    return jax.tree.map(lead, tree, is_leaf=is_named)


@jax.tree_util.register_pytree_node_class
class _Mapped:
    """Marks an array whose leading, unnamed dimension is the one mapped."""

    def __init__(self, x):
        self.x = x

    def tree_flatten(self):
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(children[0])


def _is_mapped(x) -> bool:
    return isinstance(x, _Mapped)


def _unwrap(tree):
    return jax.tree.map(lambda x: x.x if _is_mapped(x) else x, tree, is_leaf=_is_mapped)


def _restore(tree, name: str):
    def back(x):
        return NamedArray(x.array, (name, *x.names), ((), *x.slices) if x.slices else ()) if is_named(x) else x

    return jax.tree.map(back, tree, is_leaf=is_named)


def _name(axis) -> str:
    return axis.name if isinstance(axis, Axis) else axis


def vmap(fn, axis: str | Axis):
    """Maps a function over a name.

    Arrays that have the name are mapped, everything else is passed whole. Inside
    `fn` the name is gone; the results get it back as their first dimension.

    >>> import jax.numpy as jnp
    >>> from trellis.named import named
    >>> x = named(jnp.ones((2, 3)), "batch embed")
    >>> vmap(lambda row: row.sum("embed"), "batch")(x).shape
    {'batch': 2}

    Raises:
        NamesError: no argument has the name, or with different sizes.
    """
    name = _name(axis)

    def mapped(*args, **kwargs):
        _length((args, kwargs), name, "vmap")
        tree = _front((args, kwargs), name)
        in_axes = jax.tree.map(lambda x: 0 if _is_mapped(x) else None, tree, is_leaf=_is_mapped)

        def call(tree):
            args, kwargs = _unwrap(tree)
            return fn(*args, **kwargs)

        return _restore(jax.vmap(call, in_axes=(in_axes,))(tree), name)

    return mapped


def scan(fn, axis: str | Axis, *, reverse: bool = False, unroll: int = 1, policy=None):
    """A loop along a name that carries a value: `carry, ys = scan(f, "layers")(carry, xs)`.

    `fn(carry, x) -> (carry, y)` sees one position of every array in `xs` that
    has the name, and everything else whole. It is compiled once. A sliced name
    is gathered first.

    Args:
        fn: the body.
        axis: the name.
        reverse: from the last position to the first.
        unroll: how many bodies one iteration of the compiled loop holds.
        policy: what each iteration keeps for the backward pass (see `trellis.keep`).
    """
    from trellis.named.saving import checkpoint

    name = _name(axis)

    def scanned(carry, *xs):
        length = _length(xs, name, "scan")
        gathered = lambda x: whole(x, (name,), "scan") if is_named(x) and name in x.names else x
        tree = _front(jax.tree.map(gathered, xs, is_leaf=is_named), name)
        leaves, structure = jax.tree.flatten(tree, is_leaf=_is_mapped)
        moving = [x.x if _is_mapped(x) else None for x in leaves]
        still = [None if _is_mapped(x) else x for x in leaves]

        def body(carry, moving):
            slots = [s if m is None else m for m, s in zip(moving, still, strict=True)]
            carry, y = fn(_pinned(carry), *jax.tree.unflatten(structure, slots))
            return _pinned(carry), y

        body = checkpoint(body, policy)
        if 0 < length <= unroll:
            carry, ys = _written_out(body, carry, moving, length, reverse)
        else:
            carry, ys = jax.lax.scan(body, carry, moving, length=length, reverse=reverse, unroll=unroll)
        return carry, _restore(ys, name)

    return scanned


def _written_out(body, carry, moving, length: int, reverse: bool):
    """What `jax.lax.scan` computes, without a loop: the body is still traced once, and what it keeps for the backward
    pass is kept as it is, where an unrolled `lax.scan` stacks it and takes it apart again."""
    leaves, structure = jax.tree.flatten(moving)
    parts = [positions(x, 0) for x in leaves]
    one, ys = jax.jit(body), {}
    for i in reversed(range(length)) if reverse else range(length):
        carry, ys[i] = one(carry, jax.tree.unflatten(structure, [part[i] for part in parts]))
    return carry, jax.tree.map(lambda *y: jnp.stack(y), *(ys[i] for i in range(length)))


def _pinned(tree):
    """The same values with their shardings written down once more, for the compiler; so are their gradients.

    Arguments of a loop's body carry no sharding in what JAX 0.10.2 to 0.12.0 hands to XLA. Where one is summed to
    partial sums (the gradient of a bias on sliced positions) and gathered too, XLA gathers it first and then sums
    whole values over devices: twice the gradient on two devices, without an error.
    """

    def pin(x):
        sharding = jax.typeof(x).sharding
        return jax.reshard(x, sharding.spec) if mode_of(sharding.mesh) == "explicit" else x

    return jax.tree.map(pin, tree)


def fold(fn, axis: str | Axis, *, reverse: bool = False, unroll: int = 1, policy=None):
    """A `scan` that keeps only the last value: `x = fold(block, "layers")(x, params)`."""

    def folded(carry, *xs):
        return scan(lambda c, *x: (fn(c, *x), None), axis, reverse=reverse, unroll=unroll, policy=policy)(carry, *xs)[0]

    return folded


def map(fn, axis: str | Axis, *, policy=None):
    """One position after the other, without a carried value (where `vmap` would need too much memory)."""

    def mapped(*xs):
        return scan(lambda _, *x: (None, fn(*x)), axis, policy=policy)(None, *xs)[1]

    return mapped
