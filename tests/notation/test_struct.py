"""Structs know their abstract tree."""

import re
import typing

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from trellis.notation import (
    NotationError,
    Stack,
    bf16,
    f32,
    key,
    shaped,
    struct,
    struct_shapes,
    struct_specs,
    struct_types,
)


@struct
class Block:
    up: f32["embed/data mlp/model"]
    down: f32["mlp/model embed/data"]
    scale: float = 1.0


@struct
class Net:
    table: bf16["vocab/model embed/data"]
    layers: Stack["layers/stage", Block]
    heads: tuple[f32["embed 3"], f32["embed"] | None]
    rng: key[""]
    name: str


SIZES = {"embed": 8, "mlp": 16, "vocab": 32, "layers": 4}
MESH = AbstractMesh((4, 2, 1), ("data", "model", "stage"), axis_types=(AxisType.Explicit,) * 3)


def test_the_abstract_tree():
    tree = struct_shapes(Net, SIZES, MESH, name="net")
    assert isinstance(tree, Net)
    assert tree.name == "net"
    assert tree.layers.scale == 1.0
    assert (tree.layers.up.shape, tree.layers.up.dtype) == ((4, 8, 16), jnp.float32)
    # The stage axis has size 1, so nothing is sliced over it.
    assert tree.layers.up.sharding == NamedSharding(MESH, PartitionSpec(None, "data", "model"))
    assert (tree.table.shape, tree.table.dtype) == ((32, 8), jnp.bfloat16)
    assert [h.shape for h in tree.heads] == [(8, 3), (8,)]
    assert tree.rng.dtype == jax.random.key(0).dtype
    assert len(jax.tree.leaves(tree)) == 6


def test_without_a_mesh_and_the_specs_alone():
    assert struct_shapes(Net, SIZES, name="net").table == jax.ShapeDtypeStruct((32, 8), jnp.bfloat16)
    tree = struct_specs(Net, name="net")
    assert tree.layers.down == PartitionSpec("stage", "model", "data")
    assert struct_specs(Net, MESH, name="net").layers.down == PartitionSpec(None, "model", "data")
    assert struct_types(Net, name="net").layers.up == f32["layers/stage embed/data mlp/model"]
    assert struct_shapes(f32["embed/data"], SIZES, MESH).sharding.spec == PartitionSpec("data")
    assert struct_shapes(Stack["a b", f32["embed"]], {**SIZES, "a": 2, "b": 3}).shape == (2, 3, 8)


def test_a_struct_is_a_frozen_pytree():
    block = Block(jnp.ones((8, 16)), jnp.ones((16, 8)), 2.0)
    doubled = jax.jit(lambda b: jax.tree.map(lambda x: x * b.scale, b))(block)
    assert doubled.scale == 2.0
    assert float(doubled.up[0, 0]) == 2.0
    with pytest.raises(AttributeError):
        block.up = None


def fields(**annotations):
    return struct(type("Some", (), {"__annotations__": annotations}))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: struct_shapes(fields(w=f32["embed/data"]), {"embed": 6}, MESH),
            "a dimension must be divisible by the mesh axes that slice it, got embed=6 over data=4, in `Some.w`: make "
            "embed 4 or 8, or slice it over other axes",
        ),
        (
            lambda: struct_shapes(fields(w=f32["embed/data/model"]), {"embed": 6}, MESH),
            "a dimension must be divisible by the mesh axes that slice it, got embed=6 over data/model=8, in "
            "`Some.w`: make embed 8, or slice it",
        ),
        (
            lambda: struct_shapes(fields(w=f32["embed mlp"]), {"embed": 6}),
            "an abstract tree needs a length for each name, got embed, in `Some.w`: add mlp=... to the sizes",
        ),
        (
            lambda: struct_shapes(fields(w=f32["embed/expert"]), {"embed": 6}, MESH),
            "a sharding can only use axes of its mesh, got 'expert' where the mesh has data, model, stage, in "
            "`Some.w`: use one of these, or add 'expert' to the mesh (size 1 will do)",
        ),
        (
            lambda: struct_shapes(fields(w=f32["... embed"]), {"embed": 6}),
            "an abstract array must have all its dimensions named, got '... embed', in `Some.w`: write them instead "
            "of '...'",
        ),
        (
            lambda: struct_shapes(fields(w=shaped["embed"]), {"embed": 6}),
            "an abstract tree needs a dtype for each array, got 'shaped', in an annotation: write f32, bf16, ... "
            "instead",
        ),
        (
            lambda: struct_shapes(fields(w=list[f32["embed"]]), {"embed": 6}),
            'an abstract tree needs to know what a field holds, got list[f32["embed"]], in `Some.w`: annotate an '
            "array, a "
            "struct, a tuple of these or Stack[...], or pass a static field's value by name",
        ),
        (
            lambda: struct_shapes(fields(w=f32["embed"], size=int), {"embed": 6}),
            "an abstract tree needs to know what a field holds, got <class 'int'>, in `Some.size`",
        ),
        (
            lambda: struct_shapes(fields(w=f32["embed"] | bf16["embed"]), {"embed": 6}),
            "an abstract tree needs one type for each field, got ",
        ),
    ],
)
def test_what_has_no_abstract_tree(build, message):
    with pytest.raises(NotationError, match=re.escape(message)):
        build()


class Chain(typing.NamedTuple):
    length: int
    rest: "Chain | None" = None


def test_a_named_tuple_is_a_part_of_the_tree():
    class Moments(typing.NamedTuple):
        mean: f32["embed/data"]
        count: int = 0

    @struct
    class State:
        moments: None | Stack["layers", Moments]  # in either order
        plain: Moments | None
        chain: Chain = Chain(1)

    tree = struct_shapes(State, SIZES)
    assert (tree.moments.mean.shape, tree.moments.count, tree.plain.mean.shape) == ((4, 8), 0, (8,))
    assert struct_specs(State).plain.mean == PartitionSpec("data")
    assert len(jax.tree.leaves(State(Moments(jnp.ones(2)), None))) == 2  # a chain of numbers is static


def test_a_struct_of_given_types():
    Kept = typing.TypeVar("Kept")

    @struct
    class Block(typing.Generic[Kept]):
        w: f32["a b/d"]
        kept: Kept

    assert struct_shapes(Block[f32["a"]], dict(a=2, b=4)).kept.shape == (2,)
    with pytest.raises(NotationError, match="an abstract tree needs to know what a field holds, got ~Kept"):
        struct_shapes(Block, dict(a=2, b=4))
