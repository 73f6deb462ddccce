"""Which parameters an optimizer treats how, by their names and the names of their axes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from trellis.named import is_named

# Axes that only say how many of a parameter there are, where they lead.
_COUNTING = ("stage", "layers", "experts")


class Parameter(NamedTuple):
    """A parameter as an optimizer sees it.

    Attributes:
        path: its place in the model, as in blocks/attention/q.
        names: the names of its axes; empty for a plain array.
        counting: how many leading axes only count parameters of one kind (layers, experts).
        ndim: its number of axes.
    """

    path: str
    names: tuple[str, ...]
    counting: int
    ndim: int

    def matches(self, words: Sequence[str]) -> bool:
        """Whether a word is in its path or is the name of one of its axes."""
        return any(word in self.path or word in self.names for word in words)


def describe(path: tuple, leaf: Any) -> Parameter:
    """What an optimizer needs to know about a leaf of a tree of parameters: a named or plain array."""
    names = tuple(leaf.names) if is_named(leaf) else ()
    counting = 0
    while counting < len(names) and names[counting] in _COUNTING:
        counting += 1
    text = jax.tree_util.keystr(path, simple=True, separator="/")
    return Parameter(text, names, counting, len(names) if is_named(leaf) else leaf.ndim)


def label(params: Any, choose: Callable[[Parameter], Any]) -> Any:
    """A tree like `params` with what `choose` says in place of each array."""

    def leaf(path: tuple, value: Any) -> Any:
        chosen = choose(describe(path, value))
        return jax.tree.map(lambda _: chosen, value)

    return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_named)


def by_group(
    choose: Callable[[Parameter], str], rules: Mapping[str, optax.GradientTransformation]
) -> optax.GradientTransformation:
    """Treats each parameter by one of several rules.

    As `optax.partition`, but a rule's state holds only its own parameters, by their paths: a named array is there whole
    or not at all.

    Args:
        choose: the key of a parameter's rule.
        rules: transformations of a dictionary of parameters.
    """

    def split(tree: Any) -> dict[str, dict[str, Any]]:
        groups: dict[str, dict[str, Any]] = {key: {} for key in rules}
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_named):
            parameter = describe(path, leaf)
            groups[choose(parameter)][parameter.path] = leaf
        return groups

    def init(params: Any) -> dict[str, Any]:
        return {key: rules[key].init(group) for key, group in split(params).items()}

    def update(updates: Any, state: dict[str, Any], params: Any = None) -> tuple[Any, dict[str, Any]]:
        values = split(params) if params is not None else dict.fromkeys(rules)
        done = {key: rules[key].update(group, state[key], values[key]) for key, group in split(updates).items()}
        moved = {path: update for group, _ in done.values() for path, update in group.items()}
        together = jax.tree_util.tree_map_with_path(lambda p, x: moved[describe(p, x).path], updates, is_leaf=is_named)
        return together, {key: new for key, (_, new) in done.items()}

    return optax.GradientTransformation(init, update)


def on_arrays(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """A rule whose state has arrays of other shapes than the parameters: names would not fit them, so it gets none."""

    def strip(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.array if is_named(x) else x, tree, is_leaf=is_named)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new, state = rule.update(strip(updates), state, strip(params))
        arrays = jax.tree.leaves(new)
        return jax.tree.unflatten(jax.tree.structure(updates), arrays), state

    return optax.GradientTransformation(lambda params: rule.init(strip(params)), update)


def decayed(params: Any, exclude: Sequence[str]) -> Any:
    """True for the parameters that weight decay acts on: those of two axes or more that `exclude` does not name.

    >>> import jax.numpy as jnp
    >>> decayed({"w": jnp.ones((2, 3)), "norm": jnp.ones((2, 3)), "scale": jnp.ones(3)}, ["norm"])
    {'norm': False, 'scale': False, 'w': True}
    """
    return label(params, lambda p: p.ndim - p.counting >= 2 and not p.matches(exclude))
