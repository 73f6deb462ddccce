"""Parameters: each declared once, as a field of a module, with a type that says what it is for.

    class Mlp(eqx.Module):
        up: Weight
        up_bias: Bias

What is counted as work, what is decayed, and what an optimizer treats as a matrix follow from these types.
"""

import dataclasses
import enum
import functools
import math
import typing
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax

from trellis.named import NamedArray, Stacked, is_named


class Role(enum.StrEnum):
    """What a parameter is for."""

    WEIGHT = "weight"
    TABLE = "table"
    SCALE = "scale"
    BIAS = "bias"
    PICKING = "picking"


Weight = Annotated[NamedArray, Role.WEIGHT]
"""Multiplies activations and sums over at least one of their names."""
Table = Annotated[NamedArray, Role.TABLE]
"""Rows that are looked up: of tokens, of positions."""
Scale = Annotated[NamedArray, Role.SCALE]
"""Multiplies activations element by element."""
Bias = Annotated[NamedArray, Role.BIAS]
"""Added to activations."""
Picking = Annotated[NamedArray, Role.PICKING]
"""Added to scores where experts are picked, and nowhere else: without a gradient, and used in the type that it is kept
in. Some differ by less than bfloat16 shows."""

# Axes that, if they come first, only say how many of a parameter there are.
_LAYERS = ("layers", "first_layers", "dense_layers")
COUNTING = ("stage", *_LAYERS, "experts")


class Parameter(NamedTuple):
    """A parameter of a model.

    Attributes:
        path: its place in the model: `layers.block.attention.q` is the query weight of all layers.
        leaf: a named or plain array, or its type.
        declared: the role that its field's type says, or None.
        stacks: the layers' axes of the `Stacked` around it, whatever their names.
    """

    path: str
    leaf: Any
    declared: Role | None = None
    stacks: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its axes; none for a plain array."""
        return self.leaf.names if is_named(self.leaf) else ()

    @property
    def ndim(self) -> int:
        return len(self.names) if is_named(self.leaf) else self.leaf.ndim

    @property
    def size(self) -> int:
        """The number of elements of the whole array."""
        return math.prod(self.leaf.shape.values() if is_named(self.leaf) else self.leaf.shape)

    @property
    def counting(self) -> int:
        """How many leading axes only count parameters of one kind (layers, experts)."""
        names, counting = self.names, (*COUNTING, *self.stacks)
        return next((i for i, name in enumerate(names) if name not in counting), len(names))

    @property
    def of_layers(self) -> bool:
        """Whether its first axis counts layers, of any stack."""
        return bool(self.names) and self.names[0] in (*_LAYERS, *self.stacks)

    @property
    def is_stacked(self) -> bool:
        """Whether its first axis counts layers."""
        return self.names[:1] == ("layers",)

    @property
    def role(self) -> Role:
        """What it is for. If undeclared, a weight if two axes or more are left beside those that count, else a bias."""
        return self.declared or (Role.WEIGHT if self.ndim - self.counting >= 2 else Role.BIAS)

    def matches(self, words: Sequence[str]) -> bool:
        """Whether a word is in its path or is the name of one of its axes."""
        return any(word in self.path or word in self.names for word in words)


def parameters(model: Any) -> list[Parameter]:
    """The parameters of a model, in its order, whatever its leaves are: values, types or gradients.

    >>> from trellis.named import Axis
    >>> from trellis.nn.norm import RMSNorm
    >>> [(p.path, p.role.value, p.names) for p in parameters(RMSNorm.init(Axis("embed", 4), 1e-6))]
    [('scale', 'scale', ('embed',))]
    """
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_named)
    return [
        Parameter(jax.tree_util.keystr(path, simple=True, separator="."), leaf, *told(model, path))
        for path, leaf in leaves
    ]


def told(node: Any, path: tuple) -> tuple[Role | None, tuple[str, ...]]:
    """What a tree says of a leaf: the role that the last field on the way to it declares, and the layers' axes of the
    stacks on this way."""
    role, stacks = None, []
    for key in path:
        if isinstance(node, Stacked):
            stacks.append(node.axis.name)
        match key:
            case jax.tree_util.GetAttrKey(name=name):
                role, node = _roles(type(node)).get(name), getattr(node, name)
            case jax.tree_util.DictKey(key=index) | jax.tree_util.SequenceKey(idx=index):
                node = node[index]  # a list of weights is declared as one
            case _:
                return None, tuple(stacks)
    return role, tuple(stacks)


@functools.cache
def _roles(cls: type) -> dict[str, Role]:
    if not dataclasses.is_dataclass(cls):
        return {}
    hints = {field.name: field.type for field in dataclasses.fields(cls)}
    if any(isinstance(hint, str) for hint in hints.values()):
        hints = typing.get_type_hints(cls, include_extras=True)
    return {name: role for name, hint in hints.items() if (role := _role_in(hint)) is not None}


def _role_in(hint: Any) -> Role | None:
    """The role anywhere in a type: `Weight`, `Bias | None`, `list[Weight]`."""
    own = getattr(hint, "__metadata__", ())
    inner = (_role_in(part) for part in typing.get_args(hint))
    return next((role for role in (*own, *inner) if isinstance(role, Role)), None)
