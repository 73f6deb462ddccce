"""The types in which a model is kept and computes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from trellis.choices import check_choices
from trellis.errors import UserError
from trellis.frozen import FrozenMap
from trellis.named import NamedArray, Narrow, is_named, random
from trellis.named.backend import type_of_all
from trellis.nn.parameters import COUNTING, Parameter, Role, parameters, told

DType = Literal["float32", "bfloat16", "float16"]
ProductKind = Literal["fp8", "int8", "mxfp8", "nvfp4"]

# The stream of a step's random numbers that rounds gradients; dropout takes others.
_STREAM = 0x4E56


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The types in which numbers are kept and computed. Sums over a batch and the loss are always float32.

    If the model is put to use inside the function that is differentiated, its gradient is in the type in which the
    model rests.

    >>> policy = Precision(compute="bfloat16", exceptions={"norm": "float32"})
    >>> model = {"norm": tr.ones({"embed": 2}), "up": tr.ones({"embed": 2, "mlp": 4})}
    >>> {name: str(x.dtype) for name, x in policy.in_use(model).items()}
    {'norm': 'float32', 'up': 'bfloat16'}
    >>> Precision(products={"up": "int8"}).in_use(model)["up"].kind
    'int8'
    """

    params: DType = "float32"
    """Type of parameters and optimizer state; of float16 parameters the state is float32, since squares of gradients
    would be zero. Choose bfloat16 if they do not fit otherwise; small updates are then lost, unless updates=random."""
    updates: Literal["nearest", "random"] = "nearest"
    """How updated parameters are rounded to a type below float32: to the nearest number, or to one of two neighbours
    at random, without bias. Choose random with params=bfloat16, so that small updates add up."""
    compute: DType = "bfloat16"
    """Type of activations, and of parameters in use. Choose float32 on CPUs without bfloat16 products, and to see
    whether rounding is at fault."""
    exceptions: Mapping[str, DType] = dataclasses.field(default_factory=FrozenMap)
    """What is computed in another type: a part of a parameter's name or one of its axes, and the type, as in norm:
    float32. A layer's result is in the type of what it is given, which is that of the table of tokens. Name parts that
    are sensitive, such as a router."""

    products: Mapping[str, ProductKind] = dataclasses.field(default_factory=FrozenMap)
    """Products in eight or four bits: a part of a weight's name or one of its axes (mlp, heads, experts; vocab for the
    unembedding), and fp8, int8, mxfp8 (e4m3 with a scale for each 32 by 32 numbers) or nvfp4 (e2m1 with a scale for 16
    numbers; NVIDIA's GPUs from Blackwell on), as in mlp: int8. Choose it if the plan says that it pays: on chips with
    units for it, and where a step waits for gathered weights."""

    amax_history: int = 0
    """Number of earlier steps whose largest elements give the scales of products in fp8 and int8; 0 for the step
    itself. Choose it if finding the largest element first, and then rounding, takes too long; elements larger than in
    those steps are clipped."""

    moments: Mapping[str, Literal["mxfp8"]] = dataclasses.field(default_factory=FrozenMap)
    """Weights and tables whose moving averages are kept in eight bits: a part of a parameter's name or one of its axes
    (mlp, heads, experts), and mxfp8, e4m3 in blocks of 32 numbers, as in mlp: mxfp8. Choose it if parameters and
    optimizer do not fit otherwise."""

    def __post_init__(self):
        check_choices(self)
        object.__setattr__(self, "moments", FrozenMap(self.moments))
        object.__setattr__(self, "exceptions", FrozenMap(self.exceptions))
        object.__setattr__(self, "products", FrozenMap(self.products))
        if self.updates == "random" and self.params == "float32":
            raise UserError(
                "Random rounding of updates needs parameters in a type below float32.",
                seen="updates=random, params=float32",
                where="updates",
                fix="use params=bfloat16 too, or updates=nearest",
            )

        if self.amax_history < 0 or (self.amax_history and not set(self.products.values()) & {"fp8", "int8"}):
            raise UserError(
                "`amax_history` must be 0 or more, and needs products in fp8 or int8.",
                seen=f"amax_history={self.amax_history}, products={dict(self.products)}",
                where="amax_history",
                fix="use amax_history=0, or 1 or more with products in fp8 or int8",
            )

    @property
    def is_narrow(self) -> bool:
        """Whether some numbers are of a type with a small range."""
        return bool(self.products or self.moments) or "float16" in (
            self.params,
            self.compute,
            *self.exceptions.values(),
        )

    def at_rest(self, model: Any) -> Any:
        """The parameters, named arrays anywhere in a tree, in the type in which they are kept."""
        return _cast(model, lambda p: self.params)

    def in_use(self, model: Any) -> Any:
        """The parameters in the types in which they are used; weights of narrow products are marked (`tr.Narrow`)."""

        def used(p: Parameter) -> Any:
            return _first_of(self.exceptions, p) or (p.leaf.dtype if p.role == Role.PICKING else self.compute)

        return self._marked(_cast(model, used))

    def product_of(self, parameter: Parameter) -> ProductKind | None:
        """The kind of a weight's narrow products, by the first part that matches; None if they are not narrow.

        Those of routers (weights to `routes`) never are: a rounded score sends tokens to other experts. For the
        unembedding see `loss_product`.
        """
        if parameter.role != Role.WEIGHT or {"routes", "vocab"} & {*parameter.names}:
            return None
        return _first_of(self.products, parameter)

    def loss_product(self, model: Any) -> ProductKind | None:
        """The kind of the loss's products with a model's unembedding, which may be its table."""
        return _first_of(self.products, unembedding_of(model)) if self.products else None

    def moments_of(self, parameter: Parameter) -> Literal["mxfp8"] | None:
        """The eight-bit kind in which the optimizer keeps its averages of a weight or table, by the first part that
        matches; None if it keeps them in more bits."""
        if parameter.role not in (Role.WEIGHT, Role.TABLE):
            return None
        return _first_of(self.moments, parameter)

    def _marked(self, model: Any) -> Any:
        kinds = [self.product_of(p) for p in parameters(model)] if self.products else []
        if not any(kinds):
            return model
        leaves, structure = jax.tree.flatten(model, is_leaf=is_named)
        marked = [Narrow(x, kind) if kind and is_named(x) else x for x, kind in zip(leaves, kinds, strict=True)]
        return jax.tree.unflatten(structure, marked)


def in_one_type(*arrays: Any) -> tuple[Any, ...]:
    """Named arrays, narrow weights among them, in the smallest type that holds the numbers of all.

    Weights that are used together may have several types, by the `exceptions` of a `Precision`.

    Names: those of each.
    Gradient: in the type of each; nothing moves.
    Moves: nothing.

    >>> x, w = in_one_type(tr.ones({"embed": 2}).astype("bfloat16"), tr.ones({"embed": 2}))
    >>> tr.typeof(x)
    'f32[embed=2]'
    """
    kinds = set()
    for x in arrays:
        kinds.add((x.weight if isinstance(x, Narrow) else x).array.dtype)
    if len(kinds) == 1:
        return arrays
    wide = type_of_all(*kinds)
    return tuple(
        dataclasses.replace(x, weight=x.weight.astype(wide)) if isinstance(x, Narrow) else x.astype(wide)
        for x in arrays
    )


def in_type_of(made: NamedArray, given: NamedArray) -> NamedArray:
    """What a part of a layer makes, in the type of what it was given.

    Names: those of `made`.
    Gradient: in the type of `made`; nothing moves.
    Moves: nothing.

    >>> tr.typeof(in_type_of(tr.ones({"embed": 2}), tr.ones({"embed": 2}).astype("bfloat16")))
    'bf16[embed=2]'
    """
    return in_type(made, given.array.dtype)


def in_type(x: NamedArray, dtype: Any) -> NamedArray:
    """`x.astype(dtype)`, which costs nothing while tracing if it has this type."""
    return x if x.array.dtype == dtype else x.astype(dtype)


def unembedding_of(model: Any) -> Parameter:
    """The parameter that a language model's loss multiplies by."""
    return next(p for p in parameters(model) if p.leaf is model.unembedding)


def with_largest(model: Any, largest: Mapping[str, Any]) -> Any:
    """Parameters in use, whose weights get the largest elements from which their scales are made.

    Args:
        model: from `Precision.in_use`.
        largest: by path, `f32["layers factor"]` or without layers.
    """
    if not largest:
        return model

    def leaf(path, x: Any) -> Any:
        found = largest.get(jax.tree_util.keystr(path, simple=True, separator="."))
        return x if found is None else dataclasses.replace(x, largest=found)

    is_leaf = lambda x: isinstance(x, Narrow) or is_named(x)
    return jax.tree_util.tree_map_with_path(leaf, model, is_leaf=is_leaf)


def with_keys(model: Any, key: jax.Array | None) -> Any:
    """Parameters in use, with a key for each weight of nvfp4 products and each of its layers, by which gradients are
    rounded at random."""
    if key is None:
        return model
    count = 0

    def leaf(path, x: Any) -> Any:
        nonlocal count
        if not isinstance(x, Narrow) or x.kind != "nvfp4":
            return x
        mine, count = jax.random.fold_in(jax.random.fold_in(key, _STREAM), count), count + 1
        name, *_ = x.weight.names
        counts = name in (*COUNTING, *told(model, path)[1])
        return dataclasses.replace(x, key=random.split(mine, x.weight.axis(name)) if counts else mine)

    return jax.tree_util.tree_map_with_path(leaf, model, is_leaf=lambda x: isinstance(x, Narrow) or is_named(x))


def _first_of(asked: Mapping[str, Any], parameter: Parameter) -> Any:
    """What is asked for a parameter, by the first listed part that is in its name or is one of its axes; or None."""
    return next((kind for part, kind in asked.items() if parameter.matches((part,))), None)


def _cast(model: Any, type_of: Callable[[Parameter], Any]) -> Any:
    """A model's named arrays of floats in the type that each is to have."""
    cast = lambda p: is_named(p.leaf) and jnp.issubdtype(p.leaf.dtype, jnp.floating)
    leaves = [p.leaf.astype(type_of(p)) if cast(p) else p.leaf for p in parameters(model)]
    return jax.tree.unflatten(jax.tree.structure(model, is_leaf=is_named), leaves)
