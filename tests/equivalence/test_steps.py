"""Twenty steps of every family on every layout stay on one device's curve.

The step is the trainer's, assembled from a run and compiled as the trainer compiles it, with the optimizer, the
schedule and the learning rate of the recipe `tiny`, clipping and the z-loss. Each layout and each family meets both
accumulations and every checkpointing policy; each family meets every pair of the two. In float32 the loss of every step
differs from one device's by at most 1e-4 (5e-6 where this was written), the gradient norm by 1e-3 of itself. What the
optimizer keeps of each parameter's gradient after the first step is one device's, as gradients are in `test_models.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.equivalence.test_models import FAMILIES as ALL
from tests.equivalence.test_models import SHALLOW, assert_gradients_near, moved_a_little
from tests.models.small import CONFIGS, VOCAB
from tests.sample import grid
from trellis.data.batch import Batch
from trellis.inspect.ledger import ledger_of
from trellis.named import is_named
from trellis.recipes import tiny
from trellis.run.config import Remat
from trellis.run.layouts import LayoutChoice, MeshSizes
from trellis.train.assemble import assemble
from trellis.train.compilation import CompiledStep
from trellis.train.summary import step_program

ROWS, LENGTH, STEPS = 16, 16, 20
# The vocabulary of 61 is padded to 62 where two devices slice it. Microbatches of 4 rows are sliced over 4 devices.
LAYOUTS = {
    "single": (1, MeshSizes()),
    "data": (4, MeshSizes()),
    "fsdp": (4, MeshSizes()),
    "tensor": (4, MeshSizes(data=2, model=2)),
    "fsdp_tensor": (4, MeshSizes(data=2, model=2)),
    "fsdp_tensor_sequence": (4, MeshSizes(data=2, model=2)),
    "context": (4, MeshSizes(data=2, context=2)),
    "hybrid": (8, MeshSizes(replica=2, data=2, model=2)),
}
FAMILIES = {
    family: dataclasses.replace(ALL[family], layers=SHALLOW.get(family, ALL[family].layers))
    for family in ("llama", "qwen3", "gpt2", "gptj", "mixtral")
}
POLICIES = ("none", "full", "saved", "dots")
MICROBATCHES = (1, 4)


def batch(step, rows=ROWS, length=LENGTH, documents=2):
    """Rows of so many documents each, one or two, which count from one number on; the first rows count few of their
    tokens."""
    random = np.random.default_rng([3, step])
    first, stride = random.integers(0, VOCAB, (rows, 1)), random.integers(1, 4, (rows, 1))
    text, places = (first + stride * np.arange(length + 1)) % VOCAB, np.arange(length)
    cut = random.integers(3, length - 3, (rows, 1)) if documents == 2 else np.full((rows, 1), length)
    second = places >= cut
    fields = {
        "tokens": text[:, :-1],
        "targets": text[:, 1:],
        "segment_ids": second,
        "positions": np.where(second, places - cut, places),
    }
    mask = random.random((rows, length)) < np.linspace(0.2, 1, rows)[:, None]
    return {name: x.astype(np.int32) for name, x in fields.items()} | {"loss_mask": mask.astype(np.float32)}


def assembled(family, layout, microbatches, policy, **fields):
    count, mesh = LAYOUTS[layout]
    run = dataclasses.replace(
        tiny(),
        model=FAMILIES[family],
        batch_size=ROWS,
        steps=STEPS,
        microbatches=microbatches,
        remat=Remat(policy=policy),
        z_loss=1e-4,
        mesh=mesh,
        layout=LayoutChoice(preset=layout),
        **fields,
    )
    return assemble(run, jax.devices()[:count])


@functools.cache
def first_state(family):
    """One device's, on the host; the key is made anew, since a step takes it with the rest."""
    made = assembled(family, "single", 1, "none")
    with made.layout:
        state = made.init()
    state = jax.device_get(dataclasses.replace(state, key=None))
    return dataclasses.replace(state, model=moved_a_little(state.model))


def put(state, abstract):
    """A state from the host onto the devices of an abstract one; a vocabulary that is padded there gets zeros, or the
    ones of a type that has no zero."""
    state = dataclasses.replace(state, key=jax.random.key(5))

    def leaf(x, like):
        array, wanted = (x.array, like.array) if is_named(x) else (x, like)
        if array.shape != wanted.shape:
            more = [(0, most - have) for have, most in zip(array.shape, wanted.shape, strict=True)]
            array = np.pad(array, more, constant_values=int(wanted.dtype == jnp.float8_e8m0fnu))
        array = jax.device_put(array, wanted.sharding)
        return x.with_array(array) if is_named(x) else array

    return jax.tree.map(leaf, state, abstract, is_leaf=is_named)


def curve(family, layout, microbatches, policy):
    """Loss and gradient norm of every step, and the mean of gradients that the optimizer keeps after the first."""
    made = assembled(family, layout, microbatches, policy)
    step, found = CompiledStep(made.step), []
    with made.layout:
        state = put(first_state(family), made.abstract)
        for index in range(STEPS):
            data = Batch(**jax.device_put(batch(index), made.batch_sharding))
            state, metrics = step(state, data)
            found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
            if index == 0:
                gradients = jax.device_get(optax.tree.get(state.optimizer, "mu"))
    assert len(step.programs) == 1
    return *np.array(found).T, gradients


@functools.cache
def one_device(family, microbatches):
    return curve(family, "single", microbatches, "none")


@pytest.mark.parametrize(("family", "layout"), grid(FAMILIES, LAYOUTS, quick=[("llama", "fsdp")]))
def test_twenty_steps(family, layout):
    row, column = list(FAMILIES).index(family), list(LAYOUTS).index(layout)
    microbatches, policy = MICROBATCHES[(row + column) % 2], POLICIES[(row + column // 2) % 4]
    wanted, wanted_norm, wanted_gradients = one_device(family, microbatches)
    found, norm, gradients = curve(family, layout, microbatches, policy)
    assert wanted[-1] < 0.8 * wanted[0], "it learns, so that the losses say something"
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4, err_msg=f"{microbatches} microbatches, {policy}")
    np.testing.assert_allclose(norm, wanted_norm, rtol=1e-3)
    assert_gradients_near(jax.tree.map(without_padding, gradients, wanted_gradients), wanted_gradients)


def without_padding(x, like):
    """What rows of a padded vocabulary have is zero."""
    inside = tuple(map(slice, like.shape))
    assert np.count_nonzero(x) == np.count_nonzero(x[inside])
    return x[inside]


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in FAMILIES if not getattr(FAMILIES[f], "dropout", 0)])
def test_microbatches_do_not_move_the_curve(family):
    """Without dropout, whose numbers differ from one microbatch to the next."""
    np.testing.assert_allclose(one_device(family, 4)[0], one_device(family, 1)[0], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, layout",
    [
        (MeshSizes(data=4), LayoutChoice()),
        (MeshSizes(data=2, model=2), LayoutChoice(preset="fsdp_tensor_sequence")),
        (MeshSizes(data=2, context=2), LayoutChoice(context="exchange")),
    ],
    ids=["fsdp", "sequence", "exchange"],
)
def test_gradients_of_sinks_are_settled_once_for_all_microbatches(mesh, layout):
    """Or the run would be refused: a compiler sums twice what is settled in a loop and made a part of a sum again."""
    run = dataclasses.replace(
        tiny(),
        model=CONFIGS["gpt_oss"],
        batch_size=ROWS,
        microbatches=2,
        mesh=mesh,
        layout=layout,
    )
    made = assemble(run, jax.devices()[:4])
    rows = [row for row in ledger_of(step_program(made)) if row.parameter.endswith("sinks")]
    assert [row.times for row in rows if row.role == "gradients"] == [1, 1]  # of layers under a window, and of others
