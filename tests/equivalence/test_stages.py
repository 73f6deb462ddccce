"""A step through stages, one forward, one backward: its loss and gradients, and what it keeps."""

import dataclasses
import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.equivalence.test_models import FAMILIES, WHOLE, assert_near, batch
from trellis.data.batch import Batch
from trellis.inspect import ledger
from trellis.inspect.ledger import ledger_of
from trellis.inspect.work import work
from trellis.models import Routing
from trellis.models.llama.llama import Block
from trellis.named import Keep, NamedArray, NamesError, Stacked, named, named_jit, shard
from trellis.named.jit import abstract
from trellis.nn.attention.sharded import Placement
from trellis.program import trace
from trellis.run.layouts import LayoutChoice, MeshSizes, make_layout
from trellis.train.assemble import model_axes
from trellis.train.step import StepOptions, loss_and_gradients

CONFIGS = {
    "tied": dataclasses.replace(FAMILIES["llama"], layers=4),
    "dropout": FAMILIES["gpt2"],
    "odd": dataclasses.replace(FAMILIES["llama"], layers=3),
    "odd_groups": dataclasses.replace(FAMILIES["llama"], layers=6),
    "odd_experts": dataclasses.replace(FAMILIES["mixtral"], layers=3, routing=Routing(z_loss=0.01)),
    "experts": dataclasses.replace(FAMILIES["mixtral"], layers=4, routing=Routing(z_loss=0.01)),
}
TENSOR = MeshSizes(stage=2, data=2, model=2), LayoutChoice(preset="auto", pipeline_microbatches=4)
DEEP = MeshSizes(stage=4, data=2), LayoutChoice(preset="fsdp", pipeline_microbatches=4)
ALONE = MeshSizes(stage=4, data=1), LayoutChoice(preset="fsdp", pipeline_microbatches=8)
EXPERTS = (
    MeshSizes(stage=2, data=2, expert=2),
    LayoutChoice(preset="expert", pipeline_microbatches=2, pipeline_groups=2),
)


def found(jit, model, parts, options):
    """The loss and the gradients; what is dropped follows from the number of the microbatch, as on one device."""
    key = jax.random.key(2)
    sums, measured, gradients = jit(lambda m, b: loss_and_gradients(m, b, options, key))(model, parts)
    metrics = {name: float(x) for name, x in measured.metrics(sums.tokens).items()}
    return (float(sums.total / sums.tokens), jax.device_get(gradients)), metrics


@functools.cache
def whole(name: str):
    """On one device: made before a test enters its layout, whichever test is the first."""
    return CONFIGS[name].init(key=jax.random.key(0), vocab_multiple=8)


@functools.cache
def one_device(name: str, microbatches: int):
    return found(jax.jit, whole(name), Batch(**batch()).named(), StepOptions(microbatches=microbatches))


def check(name, sizes, choice, parts, **options):
    model, (wanted, metrics) = whole(name), one_device(name, parts)
    count = sizes.stage * sizes.data * sizes.model * sizes.expert
    with make_layout(sizes, choice, jax.devices()[:count], model_axes(CONFIGS[name])):
        placed = shard(model, "params"), shard(Batch(**batch()).named(), "compute")
        got, measured = found(named_jit, *placed, StepOptions(**options))
    assert_near(got, wanted)
    assert measured == pytest.approx(metrics, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sizes, choice", [TENSOR, DEEP, ALONE], ids=["tensor", "deep", "alone"])
def test_kernels_in_stages(monkeypatch, sizes, choice):
    """A kernel stands in a `shard_map` of which JAX does not track what varies: its transpose sums over every mesh axis
    that it does not name, and one of these would be the stages, with another microbatch each."""
    ran, run = [], Placement.run

    def untracked(self, *args, check=True, **more):
        ran.append(self.mesh)
        return run(self, *args, check=False, **more)

    monkeypatch.setattr(Placement, "run", untracked)
    check("tied", sizes, choice, 4)
    assert ran and all("stage" not in mesh.axis_names for mesh in ran if mesh is not None)


@pytest.mark.slow
def test_what_is_dropped_is_what_one_device_drops_in_as_many_microbatches():
    check("dropout", *TENSOR, 4)


@pytest.mark.slow
def test_groups_of_layers_and_overlapped_products():
    """Two groups on each of two stages, in which slices travel beside the products."""
    overlap = LayoutChoice(preset="auto", params=WHOLE, compute=WHOLE, overlap=("mlp", "heads"))
    check("tied", TENSOR[0], dataclasses.replace(overlap, pipeline_microbatches=4, pipeline_groups=2), 4)


@pytest.mark.slow
def test_groups_that_do_not_fit():
    choice = dataclasses.replace(TENSOR[1], pipeline_microbatches=1, pipeline_groups=2)
    model = whole("tied")
    with make_layout(TENSOR[0], choice, jax.devices()):
        model = shard(model, "params")
        with pytest.raises(
            ValueError, match="stages must divide the microbatches, got 1 of them on 2 stages with 2 groups"
        ):
            found(named_jit, model, shard(Batch(**batch()).named(), "compute"), StepOptions())


class Weighed(eqx.Module):
    """A norm, times the sum of a number for each layer: a parameter with the layers' name that is no layer's."""

    norm: eqx.Module
    weights: NamedArray

    def __call__(self, x):
        return self.norm(x) * self.weights.sum("layers")


def assert_through_stages(name, groups, changed):
    """That two stages, each on two devices, have the loss and gradients of one device, of a model that was changed."""
    wanted, _ = found(jax.jit, changed(whole(name)), Batch(**batch()).named(), StepOptions(microbatches=2))
    sizes = MeshSizes(stage=2, data=2)
    choice = LayoutChoice(preset="fsdp", pipeline_microbatches=2, pipeline_groups=groups)
    with make_layout(sizes, choice, jax.devices()[:4], model_axes(CONFIGS[name])):
        placed = shard(changed(whole(name)), "params"), shard(Batch(**batch()).named(), "compute")
        got, _ = found(named_jit, *placed, StepOptions())
    assert_near(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name, groups", [("tied", 2), ("odd", 1)])
def test_a_parameter_outside_of_the_stack_may_have_the_name_of_its_layers(name, groups):
    def weighed(model):
        weights = named(jnp.linspace(0.1, 0.9, model.config.layers), "layers")
        return eqx.tree_at(lambda m: m.norm, model, Weighed(model.norm, weights))

    assert_through_stages(name, groups, weighed)


class Gained(eqx.Module):
    """A layer, times numbers that all layers share."""

    gain: NamedArray
    layer: eqx.Module

    def __call__(self, x, *rest, **options):
        return self.layer(x, *rest, **options) * (1.0 + self.gain)


def gained(model):
    gain = named(jnp.linspace(-0.2, 0.2, model.config.embed), "embed")
    return eqx.tree_at(lambda m: m.layers, model, Stacked(Gained(gain, model.layers.block), model.layers.axis))


@pytest.mark.slow
@pytest.mark.parametrize("name, groups", [("tied", 2), ("odd", 1)])
def test_layers_may_share_a_parameter(name, groups):
    assert_through_stages(name, groups, gained)


class Remade(Stacked):
    """Runs other layers than it holds, which are made of it."""

    make: Callable = eqx.field(static=True, default=None)

    def fold(self, *args, **options):
        return Stacked(self.make(self.block), self.axis).fold(*args, **options)


def stages_of_other_layers(make: Callable):
    """The types of the gradients of a model whose layers are made in its program."""
    with make_layout(MeshSizes(stage=2, data=1), LayoutChoice(pipeline_microbatches=2), jax.devices()[:2]):
        model = jax.eval_shape(lambda: gained(CONFIGS["tied"].init(key=jax.random.key(0), vocab_multiple=8)))
        model = eqx.tree_at(lambda m: m.layers, model, Remade(model.layers.block, model.layers.axis, make=make))
        types = abstract(model, "params"), abstract(Batch(**batch()).named(), "compute")
        return jax.eval_shape(lambda m, b: loss_and_gradients(m, b, StepOptions())[2], *types)


@pytest.mark.slow
def test_stages_run_the_layers_that_the_program_runs():
    """And refuse parameters that are not the stack's: they ran the model's own in the place of others."""
    other = lambda block: Gained(named(jnp.zeros(CONFIGS["tied"].embed), "embed"), block.layer)
    with pytest.raises(NamesError, match="as they are, got another array as `gain`: make it of the stack's in each"):
        stages_of_other_layers(other)
    alone = stages_of_other_layers(lambda block: block.layer)  # the program runs them without the gain
    assert alone.layers.block.gain.shape == {"embed": CONFIGS["tied"].embed}


@pytest.mark.slow
def test_experts_in_stages():
    check("experts", *EXPERTS, 2)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", ["pending", "sharded"])
def test_stages_of_which_the_last_has_a_layer_less(accumulation):
    check("odd", *TENSOR, 4, accumulation=accumulation)


@pytest.mark.slow
def test_experts_in_stages_of_which_the_last_has_a_layer_less():
    """What each layer measures comes out beside the stream, at its own place."""
    check("odd_experts", EXPERTS[0], dataclasses.replace(EXPERTS[1], pipeline_groups=1), 2)


@pytest.mark.slow
def test_groups_of_two_sizes():
    """Six layers in four groups, 1, 2, 2 and 1 of them."""
    check("odd_groups", TENSOR[0], LayoutChoice(preset="auto", pipeline_microbatches=4, pipeline_groups=2), 4)


@pytest.mark.slow
def test_layers_that_permute_are_not_left_out():
    overlap = LayoutChoice(preset="auto", overlap=("mlp", "heads"), pipeline_microbatches=4)
    model = whole("odd")
    with make_layout(TENSOR[0], overlap, jax.devices(), model_axes(CONFIGS["odd"])):
        placed = shard(model, "params"), shard(Batch(**batch()).named(), "compute")
        with pytest.raises(
            NamesError, match="must be split evenly over the stages of a pipeline, got 3 'layers' in 2 parts"
        ):
            found(named_jit, *placed, StepOptions())


@pytest.mark.slow
def test_parameters_gathered_once_a_microbatch_and_more_microbatches():
    choice = dataclasses.replace(TENSOR[1], pipeline_microbatches=2)
    check("tied", TENSOR[0], choice, 4, accumulation="sharded", microbatches=2)


@pytest.mark.slow
def test_what_is_kept_does_not_grow_with_microbatches():
    """Four times the microbatches of the same size: the compiled step needs room for the longer batch, and no more."""

    model = whole("tied")

    def temporaries(microbatches: int) -> int:
        choice = dataclasses.replace(ALONE[1], pipeline_microbatches=microbatches)
        with make_layout(ALONE[0], choice, jax.devices()[:4]):
            rows = {name: jnp.tile(x[:1], (microbatches, 1)) for name, x in batch().items()}
            placed = shard(model, "params"), shard(Batch(**rows).named(), "compute")
            step = named_jit(lambda m, b: loss_and_gradients(m, b, StepOptions(policy=Keep()))[2])
            return step.lower(*placed).compile().memory_analysis().temp_size_in_bytes

    few, many = temporaries(8), temporaries(32)
    a_row = 16 * (4 * 4 + 4)  # tokens, targets, documents, positions and the mask
    assert many - few < 4 * 24 * a_row
    stream = 4 * 16 * CONFIGS["tied"].embed
    assert many - few < 24 * stream // 2, "the streams of the further microbatches would take more"


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", ["pending", "sharded"])
def test_rows_that_were_looked_up_are_added_to_the_sum_of_the_tables_gradient(accumulation):
    """Nothing of the size of the table is made for a microbatch, but where its gradient is summed for each of them."""
    with make_layout(*DEEP, jax.devices(), model_axes(CONFIGS["tied"])):
        model = jax.eval_shape(lambda: CONFIGS["tied"].init(key=jax.random.key(0), vocab_multiple=8))
        types = abstract(model, "params"), abstract(Batch(**batch()).named(), "compute")
        step = trace(lambda m, b: loss_and_gradients(m, b, StepOptions(accumulation=accumulation))[2], *types)
    sums = [operation.operands[0] for operation in step.walk() if operation.name == "scatter-add"]
    assert len(sums) == 2  # in the ticks with both halves, and in those with the backward one alone
    zeros = [x.maker is not None and x.maker.name == "broadcast_in_dim" for x in sums]
    assert zeros == [accumulation == "sharded"] * 2


@pytest.mark.slow
def test_positions_of_sequences_that_are_dealt_out_are_cut_into_microbatches_as_their_tokens_are():
    """A batch without documents has none of its own."""
    sizes, choice = MeshSizes(stage=2, data=2, context=2), LayoutChoice(preset="hybrid", pipeline_microbatches=4)
    with make_layout(sizes, choice, jax.devices(), model_axes(CONFIGS["tied"])):
        model = jax.eval_shape(lambda: CONFIGS["tied"].init(key=jax.random.key(0), vocab_multiple=8))
        types = abstract(model, "params"), abstract(Batch(**batch()).without_documents().named(), "compute")
        step = trace(lambda m, b: loss_and_gradients(m, b, StepOptions())[2], *types)
    assert any(operation.name == "ppermute" for operation in step.walk())


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_stages_send_the_stream_and_its_gradient_in_every_tick(groups):
    """In `M V + S - 1` ticks each; beside them only layers move, where they are dealt out to groups."""
    config = CONFIGS["tied"]
    choice = LayoutChoice(preset="fsdp", pipeline_microbatches=4, pipeline_groups=groups)
    with make_layout(MeshSizes(stage=2, data=2), choice, jax.devices()[:4]):
        model = jax.eval_shape(lambda: config.init(key=jax.random.key(0), vocab_multiple=8))
        types = abstract(model, "params"), abstract(Batch(**batch()).named(), "compute")
        rows = ledger(lambda m, b: loss_and_gradients(m, b, StepOptions())[2], *types).rows
    permutes = [row for row in rows if row.axis == "stage" and row.kind == "permute"]
    stream = 4 * 16 * config.embed  # of a device's one row
    of_layers = [row for row in permutes if "layers" in row.what]
    assert sum(row.total for row in permutes) - sum(row.total for row in of_layers) == 2 * (4 * groups + 1) * stream
    assert bool(of_layers) == (groups > 1)


@pytest.mark.slow
@pytest.mark.parametrize("together", [True, False])
def test_stages_compute_the_loss_together(together):
    """A microbatch is sent to all stages, the gradient of it added up over them, and so are two numbers a token; its
    third, the target's logit, is the loss's alone. A device multiplies with its slice of the vocabulary."""
    config = CONFIGS["tied"]
    choice = LayoutChoice(preset="fsdp", pipeline_microbatches=4, compute={} if together else {"vocab": ""})
    with make_layout(MeshSizes(stage=2, data=2), choice, jax.devices()[:4]):
        model = jax.eval_shape(lambda: config.init(key=jax.random.key(0), vocab_multiple=8))
        types = abstract(model, "params"), abstract(Batch(**batch()).named(), "compute")
        step = trace(named_jit(lambda m, b: loss_and_gradients(m, b, StepOptions())[2]), *types)
    large = [row for row in ledger_of(step).rows if row.kind == "all-reduce" and row.axis == "stage" and row.times == 4]
    stream, numbers = 4 * 16 * config.embed, 4 * 16
    assert sum(row.total for row in large) == together * 4 * 2 * (stream + numbers)
    columns = model.unembedding.shape["vocab"] // (2 if together else 1)
    of_loss = ("linear.py", "token_chunks.py")
    products = [p for p in work(step) if p.kind == "product" and p.source.startswith(of_loss)]
    assert sum(p.flops * p.times for p in products) == 3 * 4 * 2 * 16 * config.embed * columns


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "experts"])
def test_the_last_stage_may_compute_the_loss_alone(name):
    sizes, choice = TENSOR if name == "tied" else EXPERTS
    alone = dataclasses.replace(choice, compute={"vocab": "model" if name == "tied" else ""})
    check(name, sizes, alone, choice.pipeline_microbatches)


@pytest.mark.slow
def test_layers_that_stages_do_not_divide_are_dealt_out_once_each_way():
    """Three layers, of which two stages have room for two each: half of what a device has of four goes to the other."""
    config = CONFIGS["odd"]
    choice = LayoutChoice(preset="fsdp", pipeline_microbatches=4)
    with make_layout(MeshSizes(stage=2, data=2), choice, jax.devices()[:4], model_axes(config)):
        model = jax.eval_shape(lambda: config.init(key=jax.random.key(0), vocab_multiple=8))
        types = abstract(model, "params"), abstract(Batch(**batch()).named(), "compute")
        rows = ledger(lambda m, b: loss_and_gradients(m, b, StepOptions())[2], *types).rows
    dealt = [row for row in rows if row.kind == "all-to-all" and "layers" in row.what]
    assert {row.axis for row in dealt} == {"stage"}
    layer = sum(x.size for x in jax.tree.leaves(model.layers)) // 3
    assert sum(row.total for row in dealt) == 2 * (4 * 4 * layer // 4) // 2
    stream = 4 * 16 * config.embed
    assert sum(row.total for row in rows if (row.kind, row.axis) == ("permute", "stage")) == 2 * (4 + 1) * stream


@pytest.mark.slow
def test_of_microbatches_that_do_not_divide_the_batch_there_are_none():
    choice = dataclasses.replace(TENSOR[1], pipeline_microbatches=3)
    model = whole("tied")
    with make_layout(TENSOR[0], choice, jax.devices()):
        model = shard(model, "params")
        with pytest.raises(ValueError, match="a pipeline's microbatches must divide every slice of the batch evenly"):
            found(named_jit, model, shard(Batch(**batch()).named(), "compute"), StepOptions())
    assert np.isfinite(one_device("tied", 4)[0][0])


@pytest.mark.slow
def test_a_layer_computes_each_row_on_its_own(monkeypatch):
    """What it would compute along the batch would be that of a microbatch, of which layouts have their own numbers."""
    alone = Block.__call__
    mixing = lambda self, x, *rest, **options: alone(self, x - 0.1 * x.mean("batch"), *rest, **options)
    monkeypatch.setattr(Block, "__call__", mixing)
    with pytest.raises(NamesError) as error:
        check("tied", MeshSizes(stage=2, data=1), LayoutChoice(pipeline_microbatches=2), 2)
    assert str(error.value) == (
        "a layer in a pipeline must compute each row of 'batch' on its own, got mean along 'batch', of which it sees "
        "only a microbatch: move it out of the layers, or remove the layers from the layout's compute"
    )
