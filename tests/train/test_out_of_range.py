"""Which weight or gradient is the first that is not finite."""

import jax
import jax.numpy as jnp
import pytest

import trellis as tr
from trellis.train.out_of_range import first_out_of_range, named_tensor


def tree():
    return {
        "embedding": tr.ones({"vocab": 4, "embed": 8}),
        "layers": {"down": tr.ones({"layers": 3, "mlp": 2, "embed": 8}), "up": tr.ones({"layers": 3, "embed": 8})},
        "norm": tr.ones({"embed": 8}),
    }


def spoiled(*paths):
    """The tree with one number that is not finite at each of some paths, of a layer where there is one."""
    made = tree()
    for path, layer in paths:
        x = made if path in made else made["layers"]
        place = (layer, ...) if layer is not None else ...
        x[path] = x[path].with_array(x[path].array.at[place].set(jnp.nan if path == "up" else jnp.inf))
    return made


@pytest.mark.parametrize(
    "weights, gradients, said",
    [
        ([], [], ""),
        ([("norm", None)], [("norm", None)], "the weight `norm`"),
        ([("up", 1), ("down", 2)], [], "the weight `layers.up` of layer 1"),
        ([("down", 1), ("up", 1)], [], "the weight `layers.down` of layer 1"),
        ([], [("embedding", None), ("down", 0), ("up", 0)], "the gradient of `layers.up` of layer 0"),
        ([], [("down", 0), ("down", 2), ("up", 1)], "the gradient of `layers.down` of layer 2"),
    ],
)
def test_the_first_in_the_order_of_a_step(weights, gradients, said):
    model, change = spoiled(*weights), spoiled(*gradients)
    assert named_tensor(model, float(jax.jit(first_out_of_range)(model, change))) == said


def test_on_slices():
    model, change = tree(), spoiled(("down", 2))
    layout = tr.Layout(tr.make_mesh(data=4, model=2), params={"embed": "data", "mlp": "model"}, compute={})
    with layout:
        found = tr.named_jit(first_out_of_range)(tr.shard(model), tr.shard(change))
    assert named_tensor(model, float(found)) == "the gradient of `layers.down` of layer 2"
