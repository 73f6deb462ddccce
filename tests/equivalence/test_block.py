"""A transformer block and its gradients: every layout, in explicit and auto mode, equals one device."""

import functools

import jax
import numpy as np
import pytest

import trellis as tr

from .block import LAYOUTS, inputs, layout_of, loss, parameters

# Float32 sums in another order: about 1e-7 of the terms, over chains of a few hundred.
LOSS_BOUND = 2e-6
GRADIENT_BOUND = 1e-5


@functools.cache
def one_device():
    x, weights = inputs()
    value_and_grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    return jax.device_get(value_and_grad(parameters(), x, weights))


def relative(found, expected) -> float:
    """The largest deviation of a leaf, over the norm of the whole gradient."""
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(expected)))
    pairs = zip(jax.tree.leaves(jax.device_get(found)), jax.tree.leaves(expected), strict=True)
    return max(float(np.max(np.abs(a - b))) for a, b in pairs) / norm


def run(layout: tr.Layout, times: int = 1):
    with layout:
        layers, (x, weights) = tr.shard(parameters()), tr.shard(inputs(), "compute")
        value_and_grad = tr.named_jit(jax.value_and_grad(loss, argnums=(0, 1)))
        return [jax.device_get(value_and_grad(layers, x, weights)) for _ in range(times)]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_explicit_equals_one_device(name):
    first, again = run(layout_of(name), times=2)
    expected, gradients = one_device()
    assert abs(first[0] - expected) <= LOSS_BOUND * abs(expected)
    assert relative(first[1], gradients) <= GRADIENT_BOUND
    # On one mesh the same to the bit.
    jax.tree.map(np.testing.assert_array_equal, first, again)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in LAYOUTS if n != "single"])
def test_auto_equals_one_device(name):
    (found,) = run(layout_of(name, "auto"))
    expected, gradients = one_device()
    assert abs(found[0] - expected) <= LOSS_BOUND * abs(expected)
    assert relative(found[1], gradients) <= GRADIENT_BOUND


@pytest.mark.slow
def test_gradients_rest_where_parameters_do():
    with layout_of("fsdp 4 x tensor 2"):
        layers, (x, weights) = tr.shard(parameters()), tr.shard(inputs(), "compute")
        gradients = jax.eval_shape(jax.grad(loss), layers, x, weights)
        placed = jax.tree.map(lambda p, g: jax.typeof(p).sharding.spec == g.sharding.spec, layers, gradients)
    assert all(jax.tree.leaves(placed))
