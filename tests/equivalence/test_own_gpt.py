"""A GPT of a stranger's own on every layout: loss, gradients and a loss per sequence are one device's."""

import ast
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from tests.equivalence import own_gpt
from tests.equivalence.test_models import LAYOUTS, assert_near, batch
from trellis.run.layouts import make_layout


def inputs() -> dict[str, tr.NamedArray]:
    fields = batch()
    names = {"tokens": "tokens", "targets": "targets", "documents": "segment_ids", "weights": "loss_mask"}
    return {mine: tr.named(fields[theirs], "batch pos") for mine, theirs in names.items()}


@functools.cache
def one_device(dropout: bool):
    """The model, its loss and gradients, and its loss for each sequence."""
    model = jax.jit(own_gpt.GPT.init)(jax.random.key(0))
    return model, *measured(jax.jit, model, inputs(), dropout)


def measured(jit, model, data, dropout: bool):
    key = jax.random.key(1) if dropout else None
    value, gradients = jit(jax.value_and_grad(lambda m, b: own_gpt.loss(m, b, key, tr.Keep(names=None))))(model, data)
    return float(value), jax.device_get(gradients), jax.device_get(jit(own_gpt.losses)(model, data))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    # Of layouts whose axes do the same, one: all of them are tried with the models of the library.
    ["data", "tensor", "sequence", "ring", "ring, exchange", "hybrid", "pipeline", "pipeline, context", "overlap"],
)
def test_one_device_and_many(layout):
    dropout = not layout.startswith("pipeline")  # a pipeline draws what it drops for each microbatch
    model, *wanted, wanted_losses = one_device(dropout)
    sizes, choice = LAYOUTS[layout]
    with make_layout(sizes, choice, jax.devices()[: 4 if layout == "tensor" else 8]):
        placed, data = tr.shard(model), tr.shard(inputs(), "compute")
        *found, losses = measured(tr.named_jit, placed, data, dropout)
    assert_near(found, wanted)
    np.testing.assert_allclose(losses.array, wanted_losses.array, rtol=1e-5)


@pytest.mark.slow
def test_losses_for_each_sequence_add_up():
    model, value, _, losses = one_device(False)
    weights = inputs()["weights"].sum("pos").array
    assert float(jnp.sum(losses.array * weights) / jnp.sum(weights)) == pytest.approx(value, rel=1e-6)


def test_the_program_uses_public_names_only():
    tree = ast.parse(Path(own_gpt.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert modules == {"equinox", "jax", "trellis"}
