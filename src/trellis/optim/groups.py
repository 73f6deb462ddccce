"""How an optimizer treats each parameter: by its role, its name and the names of its axes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import optax

from trellis.errors import UserError
from trellis.mesh.reshard import place
from trellis.mesh.route import Axes
from trellis.named import is_named
from trellis.nn.parameters import Parameter, Role, parameters
from trellis.notation.state import state_of


def label(params: Any, choose: Callable[[Parameter], Any]) -> Any:
    """A tree like `params` with what `choose` says in place of each array."""
    chosen = [(choose(p), p.leaf) for p in parameters(params)]
    return with_leaves(params, [x.with_array(mine) if is_named(x) else mine for mine, x in chosen])


def with_leaves(tree: Any, leaves: Iterable[Any]) -> Any:
    """A tree like another, with these in place of its arrays, named ones with their names."""
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_named), list(leaves))


def moved(x: jax.Array, axes: Axes) -> jax.Array:
    """Moves `x` in explicit mode; in other modes the compiler does."""
    return place(x, axes) if state_of(x).mode == "explicit" else x


# Axes that hold several matrices, or vectors, side by side: each is treated by itself.
_SIDE_BY_SIDE = ("qkv",)
# Axes that are one side together.
_HEADS = ("heads", "kv_heads", "head_dim")


def sides(p: Parameter) -> tuple[tuple[int, ...], ...]:
    """The axes of the sides of a parameter: two sides of a matrix, one of a vector, none of a scalar.

    The sides of a weight with `embed` are `embed` and all else. Those of a weight without it are its heads together
    with their widths, and each other axis by itself, whatever its name; three or more do not say where a matrix is cut.
    The sides of a plain array are its last two axes. All other axes count matrices.
    """
    if not p.names:
        return tuple((a,) for a in range(p.ndim)[-2:])
    axes = [a for a in range(p.counting, p.ndim) if p.names[a] not in _SIDE_BY_SIDE]
    whole = [a for a in axes if p.names[a] == "embed"]
    found: dict[str, tuple[int, ...]] = {"embed": tuple(whole)} if whole else {}
    for a in (a for a in axes if a not in whole):
        side = "else" if whole else "heads" if p.names[a] in _HEADS else p.names[a]
        found[side] = (*found.get(side, ()), a)
    return tuple(found.values())


def path_of(parameter: Parameter) -> str:
    """The key of a parameter in a group, as in checkpoints."""
    return parameter.path.replace(".", "/")


def by_group(
    choose: Callable[[Parameter], str], rules: Mapping[str, optax.GradientTransformation]
) -> optax.GradientTransformation:
    """Treats each parameter by one of several rules.

    Like `optax.partition`, but a rule's state holds only its own parameters, keyed by path: a named array is in it
    whole or not at all.

    Args:
        choose: the key of a parameter's rule.
        rules: transformations of a dictionary of parameters.
    """

    def split(tree: Any) -> dict[str, dict[str, Any]]:
        groups: dict[str, dict[str, Any]] = {key: {} for key in rules}
        for parameter in parameters(tree):
            groups[choose(parameter)][path_of(parameter)] = parameter.leaf
        return groups

    def init(params: Any) -> dict[str, Any]:
        return {key: rules[key].init(group) for key, group in split(params).items()}

    def update(updates: Any, state: dict[str, Any], params: Any = None) -> tuple[Any, dict[str, Any]]:
        values = split(params) if params is not None else dict.fromkeys(rules)
        done = {key: rules[key].update(group, state[key], values[key]) for key, group in split(updates).items()}
        made = {path: update for group, _ in done.values() for path, update in group.items()}
        together = with_leaves(updates, [made[path_of(parameter)] for parameter in parameters(updates)])
        return together, {key: new for key, (_, new) in done.items()}

    return optax.GradientTransformation(init, update)


def on_arrays(rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """A rule that gets arrays without names: its state has arrays of other shapes, which the names would not fit.

    Those of Optax are `adafactor`, `novograd`, `sm3` and `zero_nans`, among others. Their state is copied to every
    device.

    >>> rule, params = on_arrays(optax.novograd(0.1)), {"w": tr.ones({"embed": 2})}
    >>> updates, state = rule.update(params, rule.init(params), params)
    >>> print(tr.typeof(updates["w"]))
    f32[embed=2]

    Args:
        rule: an Optax transformation. What it asks for beside gradients and parameters, it gets without names too.
    """

    def strip(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.array if is_named(x) else x, tree, is_leaf=is_named)

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Any]:
        new, state = optax.with_extra_args_support(rule).update(strip(updates), state, strip(params), **strip(more))
        arrays = jax.tree.leaves(new)
        # `dpsgd` gets gradients for each example, and `lookahead` those of some parameters.
        like = updates if params is None else params
        return jax.tree.unflatten(jax.tree.structure(like), arrays), state

    return optax.GradientTransformationExtraArgs(lambda params: rule.init(strip(params)), update)


def decayed(params: Any, exclude: Sequence[str]) -> Any:
    """True for the parameters that weight decay acts on: weights and tables that `exclude` does not name.

    >>> import jax.numpy as jnp
    >>> decayed({"w": jnp.ones((2, 3)), "norm": jnp.ones((2, 3)), "scale": jnp.ones(3)}, ["norm"])
    {'norm': False, 'scale': False, 'w': True}

    Raises:
        UserError: `exclude` is a text, or has an empty one, which would name every parameter.
    """
    check_words(exclude)
    return label(params, lambda p: p.role in (Role.WEIGHT, Role.TABLE) and not p.matches(exclude))


def check_words(exclude: Sequence[str]) -> None:
    """Refuses words for parameters of which one is in every name: of a text each letter would be a word."""
    if isinstance(exclude, str) or "" in exclude:
        raise UserError(
            "Words that leave parameters out of weight decay must be a tuple of them, none empty.",
            seen=f"{exclude!r}",
            where="weight_decay_exclude",
            fix="write ('norm', 'bias'), or () for none",
        )
