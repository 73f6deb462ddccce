"""Adafactor, which sums up sides of matrices, stays on one device's curve on every layout, also by default."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests.equivalence.test_models import FAMILIES, moved_a_little
from tests.equivalence.test_steps import ROWS, batch, put
from trellis.data.batch import Batch
from trellis.inspect.ledger import ledger_of
from trellis.optim import Adafactor, AdamW
from trellis.recipes import tiny
from trellis.run.layouts import LayoutChoice, MeshSizes
from trellis.train.assemble import assemble
from trellis.train.compilation import CompiledStep
from trellis.train.summary import step_program

STEPS = 5
# The vocabulary of 61 is padded to 62 or 64 where devices slice it.
LAYOUTS = {
    "data": (LayoutChoice(preset="data"), MeshSizes(data=4)),
    "fsdp": (LayoutChoice(preset="fsdp"), MeshSizes(data=4)),
    "tensor": (LayoutChoice(preset="tensor"), MeshSizes(data=2, model=2)),
    "fsdp_tensor": (LayoutChoice(), MeshSizes(data=2, model=2)),
    "vocabulary": (LayoutChoice(preset="fsdp", params={"vocab": "data", "embed": ""}), MeshSizes(data=4)),
    "stages": (LayoutChoice(), MeshSizes(data=2, stage=2)),
    "experts": (LayoutChoice(preset="expert"), MeshSizes(data=1, expert=4)),
    "by_compiler": (LayoutChoice(mode="auto"), MeshSizes(data=2, model=2)),
}


def assembled(family, layout, mesh, rule=None):
    rule = rule or Adafactor(learning_rate=0.05, min_factored_size=8, beta1=0.5)
    run = dataclasses.replace(
        tiny(), model=FAMILIES[family], batch_size=ROWS, steps=STEPS, layout=layout, mesh=mesh, optimizer=rule
    )
    count = abs(mesh.data) * mesh.model * mesh.stage * mesh.expert
    return assemble(run, jax.devices()[:count])


@functools.cache
def one_device(family):
    made = assembled(family, LayoutChoice(preset="single"), MeshSizes())
    with made.layout:
        state = jax.device_get(dataclasses.replace(made.init(), key=None))
    first = dataclasses.replace(state, model=moved_a_little(state.model))
    return first, curve(made, first)


def curve(made, first):
    step, losses = CompiledStep(made.step), []
    with made.layout:
        state = put(first, made.abstract)
        for index in range(STEPS):
            state, metrics = step(state, Batch(**jax.device_put(batch(index), made.batch_sharding)))
            losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_on_every_layout(family, layout):
    first, wanted = one_device(family)
    np.testing.assert_allclose(curve(assembled(family, *LAYOUTS[layout]), first), wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "fsdp_tensor", "vocabulary", "experts"])
def test_no_matrix_moves_for_its_second_moments(layout):
    """Beside what a step with AdamW moves there are sums, of sides."""
    gathers = []
    for rule in (AdamW(learning_rate=0.1), None):
        rows = ledger_of(step_program(assembled("mixtral", *LAYOUTS[layout], rule)))
        gathers.append(sorted((row.kind, row.payload) for row in rows if row.kind != "all-reduce"))
    assert gathers[0] == gathers[1]
