"""Layers of a stack are treated one by one, whatever the stack calls its axis."""

import equinox as eqx
import jax
import numpy as np
import pytest

import trellis as tr
from trellis import nn
from trellis.nn.parameters import parameters
from trellis.nn.precision import with_keys
from trellis.optim import Adafactor, Constant, Muon, decayed, make_optimizer

EMBED, MLP = tr.Axis("embed", 4), tr.Axis("mlp", 6)


class Layer(eqx.Module):
    up: nn.Weight
    shift: tr.NamedArray  # which declares nothing

    @staticmethod
    def init(key):
        return Layer(nn.weight(key, (EMBED, MLP), over="embed"), nn.constant(EMBED, 1.0))


def model(axis: str):
    return {"stack": tr.Stacked.init(Layer.init, tr.Axis(axis, 3), key=jax.random.key(0))}


RULES = [Muon(learning_rate=1.0), Adafactor(learning_rate=1.0, min_factored_size=2)]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_an_optimizer_treats_each_layer_of_any_stack_by_itself(rule):
    def updates(axis):
        params, optimizer = model(axis), make_optimizer(rule, Constant(warmup_steps=0), steps=1)
        return optimizer.update(params, optimizer.init(params), params)[0]["stack"].block

    wanted, found = updates("layers"), updates("stem")
    assert found.up.names == ("stem", "embed", "mlp")
    for one, other in [(wanted.up, found.up), (wanted.shift, found.shift)]:
        np.testing.assert_array_equal(one.array, other.array)


def test_the_axis_of_any_stack_counts_parameters():
    params = model("stem")
    assert [(p.role.value, p.counting, p.of_layers) for p in parameters(params)] == [("weight", 1, 1), ("bias", 1, 1)]
    assert jax.tree.leaves(decayed(params, ())) == [True, False]
    keyed = with_keys(nn.Precision(products={"up": "nvfp4"}).in_use(params), jax.random.key(0))
    assert keyed["stack"].block.up.key.shape == {"stem": 3}
