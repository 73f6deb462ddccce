"""A model whose batch is cut into parts, by microbatches or stages, computes each sequence alone, or is refused."""

import dataclasses

import jax
import pytest

from tests.equivalence.test_models import FAMILIES, batch
from trellis.data.batch import Batch
from trellis.mesh.device.view import DeviceViewError
from trellis.models import Routing
from trellis.models.llama.llama import Llama
from trellis.models.mixtral.mixtral import Block
from trellis.named import NamesError, Stacked, shard
from trellis.run.layouts import LayoutChoice, MeshSizes, make_layout
from trellis.train.step import StepOptions, loss_and_gradients

START = Llama.start
CONFIG = dataclasses.replace(FAMILIES["llama"], layers=2)


def before(mix):
    """A model that does this to what enters its layers."""

    def start(self, *given, **more):
        x, *rest = START(self, *given, **more)
        return mix(x), *rest

    return start


def traced(config, count: int, microbatches: int = 1) -> None:
    """Traces a step, its loss and its gradients, on so many stages."""
    choice = LayoutChoice(preset="fsdp", pipeline_microbatches=2 if count > 1 else None)
    with make_layout(MeshSizes(stage=count, data=1), choice, jax.devices()[:count]):

        def step(key, arrays):
            model = shard(config.init(key=key, vocab_multiple=2), "params")
            return loss_and_gradients(model, Batch(**arrays).named(), StepOptions(microbatches=microbatches))[2]

        jax.eval_shape(step, jax.random.key(0), batch())


@pytest.mark.slow
@pytest.mark.parametrize("stages, microbatches", [(2, 1), (1, 2)])
def test_what_is_around_the_layers_mixes_no_sequences(monkeypatch, stages, microbatches):
    """A mean over the batch, or its number of rows, would be that of each part."""
    monkeypatch.setattr(Llama, "start", before(lambda x: x - x.mean("batch")))
    traced(CONFIG, 1)
    with pytest.raises(NamesError) as error:
        traced(CONFIG, stages, microbatches)
    assert str(error.value) == (
        "a model whose batch is cut into parts must compute each row of 'batch' on its own, got mean along 'batch', of "
        "which it sees only a microbatch: sum, and only for what the model measures, or train with one microbatch and "
        "no stages"
    )
    for number in (lambda x: x.shape["batch"], lambda x: x.size):
        monkeypatch.setattr(Llama, "start", before(lambda x, number=number: x * (1.0 / number(x))))
        with pytest.raises(NamesError, match="got a number made from the count of rows, of which it sees"):
            traced(CONFIG, stages, microbatches)


@pytest.mark.slow
def test_layers_that_measure_mix_no_sequences(monkeypatch):
    """A mixture sums what it measures of its tokens, and takes parts of a batch side by side, which mixes nothing."""
    routing = Routing(balance_over="sequence", interleave=2)
    config = dataclasses.replace(FAMILIES["mixtral"], layers=2, routing=routing)
    traced(config, 2)
    measured = Block.measured
    mixing = lambda self, parts, *rest, **more: measured(self, [x - x.mean("batch") for x in parts], *rest, **more)
    monkeypatch.setattr(Block, "measured", mixing)
    with pytest.raises(NamesError, match="a model whose batch is cut into parts must compute each row of 'batch' on"):
        traced(config, 2)


@pytest.mark.parametrize("gives", ["carries", "gives"])
def test_integers_beside_the_stream_are_refused(monkeypatch, gives):
    """Where the layers end, they had been differentiated, with an error of JAX."""
    fold = Stacked.fold

    def counting(self, x, *args, policy=None, **more):
        count = (x * 0.0).astype("int32")
        if gives == "gives":
            return self.scan(x, *args, call=lambda layer, x, *rest: (layer(x, *rest), count), policy=policy)[0]
        call = lambda layer, both, *rest: (layer(both[0], *rest), both[1] + 1)
        return fold(self, (x, count), *args, call=call, policy=policy)[0]

    monkeypatch.setattr(Stacked, "fold", counting)
    with pytest.raises(NamesError) as error:
        traced(CONFIG, 2)
    assert str(error.value) == (
        "what the layers of a pipeline carry and give must be floating-point numbers, which have a gradient, got "
        f"i32[{'layers=2 ' if gives == 'gives' else ''}batch=4 pos=16 embed=32]: make it float32 or, if no layer "
        "changes it, pass it to the layers as an argument"
    )


@pytest.mark.slow
@pytest.mark.parametrize("of", ["the batch", "a parameter"])
def test_layers_that_close_over_an_array_are_refused_with_the_three_ways_to_hand_it_to_them(monkeypatch, of):
    fold, scales = Stacked.fold, []

    def start(self, *given, **more):
        scales[:] = [self.norm.scale]
        return START(self, *given, **more)

    def closing(self, x, *args, **more):
        read = x if of == "the batch" else scales[0]
        return fold(self, x, *args, **more, call=lambda layer, x, *rest: layer(x, *rest) + read)

    monkeypatch.setattr(Llama, "start", start)
    monkeypatch.setattr(Stacked, "fold", closing)
    with pytest.raises(DeviceViewError) as error:
        traced(CONFIG, 2)
    shape = "4 16 32" if of == "the batch" else "32"
    assert str(error.value) == (
        "A pipeline's stages must receive every array they read as an argument.\n"
        f"  seen:  an array f32[{shape}] that a function closes over\n"
        "  where: the layers\n"
        "  fix:   hold a parameter in the stack of layers, without their name if all share it; pass what is made of "
        "the batch alone to layers.fold behind x; let layers carry beside x what is made of both"
    )
