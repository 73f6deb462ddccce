"""What a loop carries: the body returns what it takes, and says where it is placed."""

from collections.abc import Callable

import jax

from trellis.mesh.reshard import place
from trellis.named.array import is_named
from trellis.notation import TypeMismatch, typeof
from trellis.notation.state import State, mode_of, state_of


class Elsewhere(TypeMismatch):
    """A body returns a carry with the right names and sizes, but elsewhere on the mesh: the loop starts there."""

    def __init__(self, message: str, body: Callable, states: list[State]):
        super().__init__(message)
        self.body, self.states = body, states

    def moved(self, carry):
        """The carry where the body puts it."""
        leaves, structure = jax.tree.flatten(carry, is_leaf=is_named)
        return structure.unflatten([self._move(x, s) for x, s in zip(leaves, self.states, strict=True)])

    def _move(self, x, state: State):
        array = x.array if is_named(x) else x
        if state.mode != "explicit" or state == state_of(array):
            return x
        names = x.names if is_named(x) else None
        moved = place(array, state.axes, state.pending, state.copied, names=names)
        return x.with_array(moved) if is_named(x) else moved


def check_carry(before, after, where: str, body: Callable) -> None:
    """Checks that a body gives what it takes, compiled or written out.

    Raises:
        TypeMismatch: the trees differ, or the names, sizes, dtype or sharding of a value.
    """
    flat = lambda tree: jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)
    (old, _), (new, _) = flat(before), flat(after)
    bare = lambda tree: jax.tree.structure(jax.tree.map(lambda x: 0, tree, is_leaf=is_named))
    if bare(before) != bare(after):
        raise TypeMismatch(
            f"a loop's body must return a carry like the one it takes, got {bare(after)} for {bare(before)}, in "
            f"{where}: return the same structure"
        )
    moved = []
    for (path, x), (_, y) in zip(old, new, strict=True):
        at = jax.tree_util.keystr(path)
        message = (
            f"a loop's body must return a carry like the one it takes, got {told(y)} for {told(x)}, in "
            f"{where}{f' at {at}' if at else ''}: rename, cast or reshard what the body returns, or start with that "
            "type"
        )
        if not _alike(x, y):
            raise TypeMismatch(message)
        states = [state_of(z.array if is_named(z) else z) for z in (x, y)]
        if states[0] != states[1] and {s.mode for s in states} == {"explicit"}:
            moved.append(message)
    if moved:
        raise Elsewhere(moved[0], body, [state_of(y.array if is_named(y) else y) for _, y in new])


def told(x) -> str:
    """The type of a value, which tells a named array without names from a plain number."""
    return f"{typeof(x)} (a named array)" if is_named(x) and not x.names else typeof(x)


def _alike(x, y) -> bool:
    names = [(a.names, a.slices) if is_named(a) else None for a in (x, y)]
    first, second = (jax.typeof(z.array if is_named(z) else z) for z in (x, y))
    if names[0] != names[1] or first.shape != second.shape:
        return False
    return first.dtype == second.dtype or getattr(first, "weak_type", False)


def pinned(tree):
    """The same values, and their gradients, with their shardings stated once more for the compiler.

    Arguments of a loop's body carry no sharding in what JAX 0.10.2 to 0.12.0 hands to XLA. If one is summed to partial
    sums (the gradient of a bias on sliced positions) and gathered too, XLA gathers it first and then sums whole values
    over devices: twice the gradient on two devices, without an error.
    """

    def pin(x):
        sharding = jax.typeof(x).sharding
        return jax.reshard(x, sharding) if mode_of(sharding.mesh) == "explicit" else x

    return jax.tree.map(pin, tree)
