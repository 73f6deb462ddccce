"""The bytes that a step moves over each mesh axis equal the closed form of its parallelism.

One device's bytes on the wire, around a ring of n devices: a gather or scatter of B bytes sends (n - 1) / n * B, an
all-reduce twice that. P is the bytes of a block's parameters, A = batch * pos * embed * 4 the bytes of an activation
on all devices together. Each layer's forward pass is computed again in the backward pass (`saving.nothing`).
"""

import jax
import jax.numpy as jnp
import pytest

import trellis as tr
from tests.models.small import CONFIGS
from trellis.data.batch import Batch
from trellis.named import saving
from trellis.named.jit import abstract
from trellis.nn.positions import dealt_axes
from trellis.run.layouts import LayoutChoice, MeshSizes, make_layout
from trellis.train.assemble import model_axes
from trellis.train.step import StepOptions, loss_and_gradients

from .block import BATCH, CONFIG, POS, inputs, layout_of, loss, parameters

LAYERS = CONFIG.layers
ACTIVATION = 4 * BATCH * POS * CONFIG.embed
WEIGHTS = 4 * (4 * CONFIG.embed * CONFIG.heads * CONFIG.head_dim + 3 * CONFIG.embed * CONFIG.mlp)
NORMS = 4 * 2 * CONFIG.embed
# The shares of what is gathered over eight devices, that move over each of three mesh axes of two, one after the other.
PER_AXIS = {"data": 1 / 2, "data_y": 1 / 4, "data_z": 1 / 8}


def types():
    """Those of the block's parameters and inputs, where the layout places them: nothing is computed."""
    return abstract(jax.eval_shape(parameters), "params"), abstract(jax.eval_shape(inputs), "compute")


def ledger(name: str, policy=saving.nothing, kind: str = "ring"):
    """The rows of a step; positions in slices are dealt out, as a training step does, unless they are exchanged."""
    layout = layout_of(name, kind=kind)
    with layout.with_dealt(dealt_axes(layout)):
        layers, (x, weights) = types()
        step = jax.value_and_grad(lambda *a: loss(*a, policy), argnums=(0, 1))
        found = tr.ledger(step, layers, x, weights)
    # The loss itself is one number: its sum is the one collective below 32 bytes.
    return [row for row in found.rows if row.payload > 4]


def total(rows, **wanted) -> int:
    """Bytes on the wire of the rows with the given kind, axis or direction."""
    return sum(row.wire * row.times for row in rows if all(getattr(row, k) == v for k, v in wanted.items()))


@pytest.mark.slow
def test_data_parallel_reduces_each_gradient_once():
    rows = ledger("data 8")
    assert {row.kind for row in rows} == {"all-reduce"}
    assert total(rows) == 2 * 7 * LAYERS * (WEIGHTS + NORMS) // 8


@pytest.mark.slow
def test_fsdp_gathers_twice_and_scatters_once():
    # Forward, recomputed forward, and the gradient: each (n - 1) / n of the parameters.
    rows = ledger("fsdp 8")
    part = 7 * LAYERS * (WEIGHTS + NORMS) // 8
    assert total(rows, kind="all-gather", direction="forward") == part
    assert total(rows, kind="all-gather", direction="recomputed") == part
    assert total(rows, kind="reduce-scatter", direction="backward") == part
    assert total(rows) == 3 * part


@pytest.mark.slow
def test_fsdp_gathers_in_the_compute_dtype():
    with layout_of("fsdp 8"):
        layers, (x, weights) = types()

        def half(layers, x, weights):
            low = jax.tree.map(lambda a: a.astype("bfloat16"), (layers, x, weights))
            return loss(*low, saving.nothing).astype("float32")

        rows = [r for r in tr.ledger(jax.grad(half), layers, x, weights).rows if r.payload > 4]
    assert {row.dtype for row in rows} == {"bf16"}
    assert total(rows) == 3 * 7 * LAYERS * (WEIGHTS + NORMS) // 2 // 8


@pytest.mark.slow
def test_tensor_parallel_is_one_all_reduce_a_half_block_each_way():
    # Megatron's count (Shoeybi et al., 2019): two forward and two backward a block.
    rows = ledger("tensor 8", policy=None)
    part = 2 * 7 * LAYERS * ACTIVATION // 8
    assert {row.kind for row in rows} == {"all-reduce"}
    assert total(rows, direction="forward") == 2 * part
    assert total(rows, direction="backward") == 2 * part
    assert sum(row.times for row in rows) == 4 * LAYERS


@pytest.mark.slow
def test_sequence_parallel_moves_the_same_bytes_as_tensor_parallel():
    # An all-reduce is a reduce-scatter and an all-gather: one of each a half block and direction, and one more
    # gather in the backward pass a half block, since what was gathered forward is gathered again there.
    rows = [row for row in ledger("fsdp 4 x tensor 2, sequence", policy=None) if row.axes == ("model",)]
    large = [row for row in rows if row.payload >= ACTIVATION // 4]
    part = LAYERS * ACTIVATION // 4 // 2
    assert total(large, kind="all-gather", direction="forward") == 2 * part
    assert total(large, kind="reduce-scatter", direction="forward") == 2 * part
    assert total(large, kind="all-gather", direction="backward") == 2 * part
    assert total(large, kind="reduce-scatter", direction="backward") == 2 * part
    # What is left are gradients of the norms, partial sums over `model`, and the angles of the positions.
    small = [row for row in rows if row not in large]
    assert total(small, direction="backward") == LAYERS * NORMS // 4
    assert total(small, direction="forward") == 4 * POS * CONFIG.head_dim // 2


@pytest.mark.slow
def test_fsdp_with_tensor_gathers_a_tensor_slice():
    rows = [row for row in ledger("fsdp 4 x tensor 2") if row.axes == ("data",)]
    assert total(rows) == 3 * 3 * LAYERS * (WEIGHTS // 2 + NORMS) // 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, forward, backward",
    [
        # Keys and values: two gathers a pass over `context`, their gradients scattered back.
        ("gather", {"all-gather": 1}, {"reduce-scatter": 1}),
        # They go around instead, and again in the backward pass, with sums of their gradients.
        ("ring", {"permute": 1}, {"permute": 2}),
        # Half of queries, keys, values and results, and of their gradients.
        ("exchange", {"all-to-all": 1}, {"all-to-all": 1}),
    ],
)
def test_context_parallel_moves_keys_and_values(kind, forward, backward):
    rows = ledger("fsdp 4 x context 2", kind=kind)
    part = 2 * LAYERS * (ACTIVATION // 4) // 2
    of_keys = [row for row in rows if row.axes == ("context",)]
    for direction, wanted in (("forward", forward), ("recomputed", forward), ("backward", backward)):
        seen = {name: total(of_keys, kind=name, direction=direction) for name in wanted}
        assert seen == {name: count * part for name, count in wanted.items()}
        assert total(of_keys, direction=direction) == sum(seen.values())
    # Parameters rest over both mesh axes and are gathered over both at once.
    joint = [row for row in rows if set(row.axes) == {"data", "context"}]
    assert total(joint) == 3 * 7 * LAYERS * (WEIGHTS + NORMS) // 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single"])
def test_one_device_moves_nothing(name):
    assert ledger(name) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, choice, wanted",
    [
        # Each device scatters over its copy's devices, and copies sum what each of them holds.
        (
            MeshSizes(replica=2, data=4),
            LayoutChoice(preset="hybrid"),
            {"all-gather data": 3 / 4, "reduce-scatter data": 3 / 4, "all-reduce replica": 1 / 4},
        ),
        # One mesh axis after the other, as the layout asks.
        (
            MeshSizes(data=2, data_y=2, data_z=2),
            LayoutChoice(preset="fsdp", gather="per_axis"),
            {f"all-gather {axis}": part for axis, part in PER_AXIS.items()}
            | {f"reduce-scatter {axis}": part for axis, part in PER_AXIS.items()},
        ),
    ],
    ids=["hybrid", "per_axis"],
)
def test_microbatches_move_parameters_and_their_gradients_once(sizes, choice, wanted):
    config = CONFIGS["llama3"]
    tokens = jax.ShapeDtypeStruct((16, 16), jnp.int32)
    with make_layout(sizes, choice, jax.devices(), {"kv_heads": 1} | model_axes(config)):
        model = abstract(jax.eval_shape(lambda: config.init(key=jax.random.key(0), vocab_multiple=8)), "params")
        batch = Batch(tokens=tokens, targets=tokens, loss_mask=jax.ShapeDtypeStruct((16, 16), jnp.float32)).named()
        batch = abstract(batch, "compute")
        step = lambda model, batch: loss_and_gradients(model, batch, StepOptions(microbatches=2))[2]
        rows = [row for row in tr.ledger(step, model, batch).rows if row.payload > 8]
    size, moved = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(model)), {}
    for row in rows:
        what = f"{row.kind} {'/'.join(row.axes)}"
        moved[what] = moved.get(what, 0) + row.wire * row.times
    assert moved == {what: size * share for what, share in wanted.items()}
