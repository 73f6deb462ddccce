"""The numbers that proofs are made with."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.models.small import CONFIGS
from trellis.named.pipeline.by_vmap import microbatches_of
from trellis.proof import one_device
from trellis.proof.one_device import on_one_device
from trellis.proof.shrinking import shrunk
from trellis.recipes import load_run
from trellis.run.layouts import make_layout
from trellis.run.on_mesh import check_on_mesh
from trellis.train.assemble import assemble, model_axes, model_types


@dataclasses.dataclass(frozen=True)
class State:
    model: np.ndarray
    optimizer: np.ndarray


@pytest.mark.parametrize(("gap", "between"), [(1e-6, True), (1e-3, False)])
def test_a_token_between_two_experts_is_noticed(monkeypatch, gap, between):
    """Its gradient goes to the likelier one, as that of a router's scores does."""
    scores = np.float32([[1, 1 - gap, 0], [0, 1 - gap, 1], [1 - gap, 0, 1], [1, 0, 1 - gap]])
    scores = np.tile(scores, (8, 1))
    step = lambda made, state, batch: (State(state.model, np.eye(3, dtype=np.float32)[state.model.argmax(1)]), {})
    monkeypatch.setattr(one_device, "_step", step)
    state = State(scores, scores)
    assert one_device._between_experts(None, state, None, step(None, state, None)) == between


@pytest.mark.slow
def test_it_is_said_where_every_draw_has_such_a_token(monkeypatch):
    calls = []
    monkeypatch.setattr(one_device, "_between_experts", lambda *given: calls.append(given) or True)
    monkeypatch.setattr(one_device, "_step", lambda made, state, batch: (state, {}))
    run = _small("mixtral_8x7b", {"mesh.data": "1", "mesh.expert": "1"})
    assert on_one_device(run, padding=1).between and len(calls) > 1
    assert not on_one_device(_small("tiny", {"mesh.data": "1"}), padding=1).between


@pytest.mark.parametrize(("recipe", "experts", "chosen"), [("deepseek_v3", 4, 2), ("qwen3_30b_a3b", 4, 2)])
def test_routers_of_shrunk_runs_choose(recipe, experts, chosen):
    model = _small(recipe, {"mesh.data": "1", "mesh.expert": "1", "mesh.expert_y": "1"}).model
    routing = model.routing
    assert model.experts // routing.groups * routing.groups_per_token == experts
    assert model.experts_per_token == chosen
    assert routing.dispatch == ("bits" if recipe == "deepseek_v3" else None)


def test_stages_divide_the_parts_of_a_shrunk_batch_if_they_have_several_groups():
    mesh = {"mesh.stage": "2", "mesh.data": "1", "mesh.context": "2", "mesh.model": "2"}
    run = load_run("llama_84m", {**mesh, "layout.pipeline_groups": "2"})
    layout = make_layout(run.mesh, run.layout, jax.devices())
    assert microbatches_of(layout, "stage", shrunk(run, layout).run.batch_size) % 2 == 0


@pytest.mark.parametrize(
    "options",
    [
        {"mesh.context": 8, "layout.context": "exchange", "model.heads": 8, "model.kv_heads": 8},
        {"mesh.model": 4, "mesh.context": 2, "layout.context": "exchange", "model.heads": 8, "model.kv_heads": 2},
        {"mesh.model": 4, "mesh.context": 2, "layout.context": "ring", "model.heads": 8, "model.kv_heads": 2},
    ],
    ids=["exchanged for heads", "exchanged for heads beside whole key heads", "a ring"],
)
def test_shrunk_runs_have_as_many_heads_as_their_layout_needs(options):
    run = load_run("tiny", {"mesh.data": "1"} | {name: str(value) for name, value in options.items()})
    layout = make_layout(run.mesh, run.layout, jax.devices(), model_axes(run.model))
    small = shrunk(run, layout).run
    check_on_mesh(small, layout, model_types(small.model))


def test_a_shrunk_model_is_no_wider_than_the_run_asks_for():
    """Its heads are as many as there are in the width that is left to it."""
    model, options = CONFIGS["gptj"], {"mesh.data": "1", "mesh.model": "2", "data.sequence_length": "32"}
    run = dataclasses.replace(load_run("tiny", options), model=model, batch_size=2)
    small = shrunk(run, make_layout(run.mesh, run.layout, jax.devices()[:2])).run.model
    assert (small.embed, small.heads) == (model.embed, model.heads)


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", ["{}", "{products: {mlp: fp8}, amax_history: 2}", "{moments: {mlp: mxfp8}}", "{compute: float16}"]
)
def test_the_plain_step_has_the_results_of_the_runs(monkeypatch, precision):
    """A run of narrow numbers keeps largest elements and names what is not finite."""
    run = _small("tiny", {"mesh.data": "1", "precision": precision})
    results = lambda made: jax.eval_shape(made.step, made.abstract, made.abstract_batch())
    zeros = lambda tree: jax.tree.map(lambda x: np.zeros(x.shape, np.float32), tree)
    monkeypatch.setattr(one_device, "_step", lambda made, state, batch: zeros(results(made)))
    made = assemble(run, jax.devices()[:1])
    with made.layout:
        names = [one_device._name(path) for path, _ in jax.tree_util.tree_leaves_with_path(results(made))]
    assert on_one_device(run, padding=1).names == names


def test_options_that_a_proof_does_without_are_named():
    options = {"mesh.data": "1", "precision.products.mlp": "fp8", "precision.amax_history": "4"}
    options |= {"precision.moments.mlp": "mxfp8", "precision.params": "bfloat16", "precision.updates": "random"}
    run = load_run("tiny", options)
    layout = make_layout(run.mesh, run.layout, jax.devices()[:1])
    names = [sentence.split()[0].strip(":") for sentence in shrunk(run, layout).left_out]
    assert names == ["precision.amax_history", "precision.moments", "precision.updates"]
    assert not shrunk(load_run("tiny", {"mesh.data": "1"}), layout).left_out


def _small(recipe, options):
    run = load_run(recipe, options)
    return shrunk(run, make_layout(run.mesh, run.layout, jax.devices()[:1])).run
