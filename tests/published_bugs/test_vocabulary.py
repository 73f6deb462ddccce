"""13. pytorch/torchtitan issue 1136, pull request 1702: the vocabulary does not divide over the devices.

The uneven slices were saved and restored as if they were even, and the loss jumped after resuming.
"""

import re

import jax
import jax.numpy as jnp
import pytest

import trellis as tr
from tests.mesh.told import told
from trellis import Axis, f32
from trellis.notation import struct_shapes


@tr.struct
class Weights:
    table: f32["vocab/model embed/data"]


def test_13_the_abstract_tree_of_a_checkpoint(mesh):
    message = (
        "a dimension must be divisible by the mesh axes that slice it, got vocab=51 over model=2, in `Weights.table`: "
        "make vocab 50 or 52, or slice it over other axes"
    )
    with pytest.raises(tr.NotationError, match=re.escape(message)):
        struct_shapes(Weights, {"vocab": 51, "embed": 8}, mesh)
    assert struct_shapes(Weights, {"vocab": 52, "embed": 8}, mesh).table.shape == (52, 8)


def test_13_manual():
    auto = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    @tr.shard_map
    def lookup(w: Weights) -> f32["vocab/model embed/data"]:
        return w.table

    message = "got vocab=51 over model=2, in argument `w.table` of `lookup`: make vocab 50 or 52"
    with jax.set_mesh(auto), pytest.raises(tr.NotationError, match=re.escape(message)):
        lookup(Weights(jnp.ones((51, 8))))

    @tr.shard_map
    def cut(table: f32["vocab embed"]) -> f32["vocab/model embed"]:
        return tr.reshard("vocab embed -> vocab/model embed", table)

    message = (
        "got vocab=51 over model=2, in reshard('vocab embed -> vocab/model embed'): make vocab 50 or 52, or slice it "
        "over other axes"
    )
    with jax.set_mesh(auto), pytest.raises(tr.NotationError) as error:
        cut(jnp.ones((51, 8)))
    assert message in told(error, by_line=True)


@pytest.mark.parametrize("make", ["random", "zeros", "shard"])
def test_13_explicit(mesh, make):
    layout = tr.Layout(mesh, params={"vocab": "model"}, compute={"vocab": "model"})
    axes = [Axis("vocab", 51), Axis("embed", 8)]
    message = (
        "a dimension must be divisible by the mesh axes that slice it, got vocab=51 over model=2, in 'vocab/model': "
        "make vocab 50 or 52"
    )
    with layout, pytest.raises(ValueError, match=re.escape(message)):
        if make == "random":
            tr.random.normal(jax.random.key(0), axes)
        elif make == "zeros":
            tr.zeros(axes)
        else:
            tr.shard(tr.named(jnp.ones((51, 8)), "vocab embed"))
