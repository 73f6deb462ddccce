"""From a run to its programs: the step guards itself, evaluation agrees with a plain computation, counts are right."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trellis.data import Batch, Batches, FileSource, count_bytes, find_files, tokenize
from trellis.errors import UserError
from trellis.inspect.ledger import ledger_of
from trellis.inspect.memory import memory_of
from trellis.mesh import Layout, make_mesh
from trellis.models import MixtralConfig
from trellis.models.llama.llama import Llama
from trellis.named import Axis, Stacked, is_named
from trellis.named.saving import nothing, products, saved
from trellis.nn import Precision
from trellis.optim import learning_rate
from trellis.recipes import tiny
from trellis.recipes.load import load_run
from trellis.run.config import BatchSize, Remat
from trellis.run.layouts import LayoutChoice, MeshSizes, make_layout
from trellis.train.assemble import assemble, keep_of, model_types, vocab_multiple
from trellis.train.checks import check_marks
from trellis.train.evaluation import Evaluator, ValidationSet
from trellis.train.flops import flops_per_token, known_peak, matmul_parameters, num_parameters
from trellis.train.step import batch_loss
from trellis.train.summary import arrays, describe, sections, step_program

LENGTH, ROWS = 16, 4


@pytest.fixture(scope="module")
def run():
    base = tiny()
    model = dataclasses.replace(base.model, vocab=257, embed=16, mlp=32, layers=1, heads=2, kv_heads=2, head_dim=8)
    return dataclasses.replace(
        base,
        model=model,
        data=dataclasses.replace(base.data, sequence_length=LENGTH),
        batch_size=ROWS,
        steps=10,
        precision=Precision(compute="float32"),
        mesh=MeshSizes(data=2, model=2),
        skip_nonfinite=1,
        ema=0.9,
    )


@pytest.fixture(scope="module")
def assembled(run):
    return assemble(run, jax.devices()[:4])


@pytest.fixture(scope="module")
def state(assembled):
    with assembled.layout:
        return assembled.init()


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Three validation sets of bytes, two in a group; the first has a last batch that is not full."""
    found = {}
    for name, sizes in {"short": range(3, 12), "text/long": range(20, 30), "text/longer": range(30, 34)}.items():
        folder = tmp_path_factory.mktemp(name.replace("/", "-"))
        for size in sizes:
            (folder / f"{size}.txt").write_text("x=1\n" * size)
        store = tokenize(FileSource(files=find_files([str(folder)])), str(folder / "store"), use_bytes=True, workers=1)
        options = {"sequence_length": LENGTH, "batch_size": ROWS, "shuffle": False, "max_epochs": 1, "pad_last": True}
        found[name] = ValidationSet(Batches(store, **options), store, limit=None if name == "short" else 2)
    return found


@pytest.mark.slow
def test_the_state_is_what_its_abstract_form_says(assembled, state):
    assert jax.tree.structure(state) == jax.tree.structure(assembled.abstract)
    for real, said in zip(jax.tree.leaves(state), jax.tree.leaves(assembled.abstract), strict=True):
        assert (real.shape, real.dtype) == (said.shape, said.dtype)
        assert real.sharding.is_equivalent_to(said.sharding, real.ndim)


@pytest.mark.slow
def test_where_the_compiler_places_a_step_leaves_the_state_where_it_lay(run):
    """Widths are sliced in use and whole at rest: the compiler would leave them sliced."""
    layout = LayoutChoice(mode="auto", params={"mlp": ""})
    made = assemble(dataclasses.replace(run, layout=layout), jax.devices()[:4])
    with made.layout:
        program = made.step.lower(made.abstract, made.abstract_batch()).compile()
    after, _ = program.output_shardings
    for said, found in zip(jax.tree.leaves(made.abstract), jax.tree.leaves(after), strict=True):
        assert found.is_equivalent_to(said.sharding, said.ndim)


def test_the_vocabulary_is_padded_for_the_mesh_and_not_counted(assembled):
    assert vocab_multiple(assembled.layout) == 2
    assert assembled.abstract.model.embedding.shape == {"vocab": 258, "embed": 16}
    attention, mlp, norms = 4 * 16 * 2 * 8, 3 * 16 * 32, 3 * 16
    assert num_parameters(assembled.abstract.model) == 257 * 16 + attention + mlp + norms
    assert matmul_parameters(assembled.abstract.model) == 257 * 16 + attention + mlp


def test_a_vocabulary_that_stages_slice_divides_over_its_slices_at_rest_and_in_use_at_once():
    at_rest = LayoutChoice(preset="fsdp", params={"vocab": "data", "embed": ""})
    layout = make_layout(MeshSizes(stage=2, data=4), at_rest, jax.devices())
    assert layout.assign(("vocab", "embed"))[0] == ("stage",)
    assert vocab_multiple(layout) == 8


def test_flops_count_products_once_forward_and_twice_backward(assembled):
    model = assembled.abstract.model
    products = 6 * (257 * 16 + 4 * 16 * 16 + 3 * 16 * 32)
    # Scores and weighted values: 2 products of 2 heads x 8 over LENGTH keys, 2 FLOPs each, three passes, causal half.
    causal = 2 * 2 * 2 * 8 * LENGTH * 3 / 2
    assert flops_per_token(model, LENGTH) == products + causal
    assert flops_per_token(model, LENGTH, causal=False) == products + 2 * causal


def test_the_best_peak_of_a_machine_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = iter([5e9, 2e9, 9e9])
    monkeypatch.setattr("trellis.train.flops.matmul_peak", lambda devices, dtype: next(measured))
    assert [known_peak(jax.devices(), "float32") for _ in range(3)] == [5e9, 5e9, 9e9]
    monkeypatch.setattr("trellis.train.flops.matmul_peak", lambda devices, dtype: None)
    assert known_peak(jax.devices(), "float32") is None


@pytest.mark.slow
def test_an_update_that_is_not_finite_changes_nothing_but_the_count(assembled):
    """The mask holds one infinite weight: the loss and the gradient are no numbers. The schedule goes by the steps of
    the run, as the metrics do."""
    size = (ROWS, LENGTH)
    batch = {
        "tokens": np.ones(size, np.int32),
        "targets": np.ones(size, np.int32),
        "loss_mask": np.ones(size, np.float32),
        "segment_ids": np.ones(size, np.int32),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
    }
    spoilt = batch | {"loss_mask": np.where(np.arange(LENGTH) == 3, np.inf, batch["loss_mask"]).astype(np.float32)}
    copy = lambda tree: [np.asarray(x) for x in jax.tree.leaves(tree)]
    with assembled.layout:
        put = lambda fields: Batch(**jax.device_put(fields, assembled.batch_sharding))
        first = assembled.init()
        kept = lambda state: (state.model, state.optimizer[:-1], state.average)
        before = copy(kept(first))
        second, metrics = assembled.step(first, put(spoilt))
        assert not np.isfinite(float(metrics["loss"])) and int(second.step) == 1
        for old, new in zip(before, copy(kept(second)), strict=True):
            np.testing.assert_array_equal(old, new)
        third, metrics = assembled.step(second, put(batch))
        assert np.isfinite(float(metrics["loss"])) and int(third.step) == 2
        assert learning_rate(third.optimizer) == metrics["learning_rate"] == np.float32(0.005)  # 2 of 4 of warmup
        assert any((old != new).any() for old, new in zip(before, copy((third.model,))))
        made = int(third.optimizer[1].count)
        fourth, metrics = assembled.step(third, put(batch | {"loss_mask": 0 * batch["loss_mask"]}))
        assert np.isnan(float(metrics["loss"])) and float(metrics["grad_norm"]) == 0.0
        assert int(fourth.optimizer[1].count) == made + 1  # a step over no tokens is one, as without skipping


@pytest.mark.slow
def test_evaluation_adds_up_over_batches_sets_and_devices(assembled, state, sets):
    compiled = []

    def count(event, *_, **__):
        compiled.append(event) if event == "/jax/core/compile/backend_compile_duration" else None

    with assembled.layout:
        evaluation = Evaluator(sets, assembled.options, assembled.batch_sharding)
        jax.monitoring.register_event_duration_secs_listener(count)
        try:
            found = {name: float(value) for name, value in evaluation(state).items()}
            assert len(compiled) == 2, "one program for all batches, and one for what is said of their sums"
            again = evaluation(state)
        finally:
            jax.monitoring.unregister_event_duration_listener(count)
    assert len(compiled) == 2, "a second evaluation compiles nothing"
    assert {name: float(value) for name, value in again.items()} == found

    one = jax.tree.map(lambda x: x.with_array(jnp.asarray(np.asarray(x.array))), state.average, is_leaf=is_named)
    nats, tokens, text = {}, {}, {}
    for name, chosen in sets.items():
        batches = [chosen.batches.batch(i) for i in range(chosen.num_batches)]
        sums = [batch_loss(one, b.named(), assembled.options)[0] for b in batches]
        nats[name], tokens[name] = (sum(float(getattr(s, f)) for s in sums) for f in ("cross_entropy", "tokens"))
        text[name] = sum(count_bytes(chosen.store, b) for b in batches)
        assert tokens[name] == sum(float(b.loss_mask.sum()) for b in batches) > 0
        assert found[f"validation_loss/{name}"] == pytest.approx(nats[name] / tokens[name], rel=1e-5)
        assert found[f"bits_per_byte/{name}"] == pytest.approx(nats[name] / math.log(2) / text[name], rel=1e-5)
    group = ("text/long", "text/longer")
    of = lambda values, names: sum(values[name] for name in names)
    assert found["validation_loss/text"] == pytest.approx(of(nats, group) / of(tokens, group), rel=1e-5)
    assert found["bits_per_byte/text"] == pytest.approx(of(nats, group) / math.log(2) / of(text, group), rel=1e-5)
    for ending, names in {"": tuple(sets), "/text": group}.items():
        losses = [nats[name] / tokens[name] for name in names]
        bits = [nats[name] / math.log(2) / text[name] for name in names]
        assert found[f"validation_loss_macro{ending}"] == pytest.approx(np.mean(losses), rel=1e-5)
        assert found[f"bits_per_byte_macro{ending}"] == pytest.approx(np.mean(bits), rel=1e-5)
    loss = sum(nats.values()) / sum(tokens.values())
    assert found["validation_loss"] == pytest.approx(loss, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(sum(nats.values()) / math.log(2) / sum(text.values()), rel=1e-5)


@pytest.mark.slow
def test_a_long_evaluation_keeps_few_batches_on_the_devices(assembled, state, sets):
    """More than 32 programs for each of several CPU devices, and XLA would hang."""
    chosen = sets["short"]
    long = chosen._replace(batches=Batches(chosen.store, sequence_length=LENGTH, batch_size=ROWS, max_epochs=40))
    assert long.num_batches > 100
    with assembled.layout:
        evaluation = Evaluator({"long": long}, assembled.options, assembled.batch_sharding)
        assert math.isfinite(float(evaluation(state)["validation_loss"]))


@pytest.mark.slow
def test_what_a_run_is_about_to_do_is_plain_values(assembled, run):
    import json

    program = step_program(assembled)
    found = json.loads(json.dumps(sections(assembled, memory_of(program).per_kind(), ledger_of(program), tokens=5000)))
    assert found["tokens"] == {"run": run.steps * ROWS * LENGTH, "corpus": 5000} and run.steps * ROWS * LENGTH == 640
    padded = sections(assembled, memory_of(program).per_kind(), ledger_of(program), tokens=5000, filled=0.25)
    assert padded["tokens"] == {"run": 160, "corpus": 5000}
    assert found["mesh"] == {"data": 2, "model": 2} and found["ledger"]["per_axis"].keys() == {"data", "model"}
    table = next(a for a in arrays(assembled) if a["name"] == "embedding")
    assert table["bytes"] == 258 * 16 * 4 and table["device_bytes"] == table["bytes"] // 4
    assert [dim["mesh"] for dim in table["dims"]] == [["model"], ["data"]]
    assert describe(found).splitlines()[:3] == [
        "model    llama, 6.72k parameters",
        "tokens   640 to read, 0.13 times the corpus of 5.00k",
        "devices  4 x cpu, mesh data=2 model=2",
    ]
    memory = found["memory"]
    assert memory["parameters"] >= sum(a["device_bytes"] for a in arrays(assembled))
    assert memory["optimizer"] >= 2 * sum(a["device_bytes"] for a in arrays(assembled))


def test_checkpointing_policies_have_their_meaning():
    assert keep_of(Remat(policy="none")) is None
    assert keep_of(Remat(policy="full")) == nothing and keep_of(Remat(policy="dots")) == products
    assert keep_of(Remat(policy="saved")) == saved
    assert keep_of(Remat(policy="saved", names=("query",))).names == ("query",)
    assert keep_of(Remat(policy="offload", names=("query",))).offload == ("query",)


@pytest.mark.slow
def test_the_compiler_may_place_instead(run):
    auto = dataclasses.replace(run, layout=LayoutChoice(mode="auto"), ema=None, skip_nonfinite=0)
    found = assemble(auto, jax.devices()[:4])
    with found.layout:
        state = found.init()
    table = state.model.embedding.array
    assert table.sharding.shard_shape(table.shape) == (129, 8)
    assert Precision(compute="bfloat16").in_use(state.model).embedding.dtype == jnp.bfloat16
    program = step_program(found)
    said = describe(sections(found, memory_of(program).per_kind(), ledger_of(program), tokens=None))
    assert " from each device in a step: data " in said
    assert ", or what the compiler chooses along data, model (auto mode)" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, 4),
        ({"precision": Precision(compute="bfloat16")}, 2),
        ({"batch_size": 5}, 1),  # five parts would be further from what is fast than one
        ({"batch_size": 1}, 1),
        ({"batch_size": (BatchSize(step=0, size=8), BatchSize(step=5, size=12))}, 1),
        ({"batch_size": (BatchSize(step=0, size=8), BatchSize(step=5, size=16))}, 2),
        ({"microbatches": 1}, 1),
        ({"mesh": MeshSizes(data=2), "layout": LayoutChoice()}, 2),
        ({"mesh": MeshSizes(stage=2), "layout": LayoutChoice()}, 1),
        ({"mesh": MeshSizes(data=4), "layout": LayoutChoice()}, 1),  # a rehearsal
    ],
)
def test_a_cpu_takes_a_batch_in_parts(run, monkeypatch, changes, wanted):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(2)), raising=False)
    data = dataclasses.replace(run.data, sequence_length=256)
    base = dataclasses.replace(run, data=data, batch_size=16, mesh=MeshSizes(), layout=LayoutChoice(preset="single"))
    changed = dataclasses.replace(base, model=dataclasses.replace(run.model, layers=2), **changes)
    devices = jax.devices()[: math.prod(size for size in dataclasses.asdict(changed.mesh).values() if size > 0)]
    made = assemble(changed, devices)
    assert made.options.microbatches == wanted
    with made.layout:
        assert ledger_of(step_program(made)) is not None


def test_experts_whose_shares_are_the_batchs_go_undivided(run):
    model = MixtralConfig(
        vocab=64, embed=16, layers=1, heads=2, kv_heads=2, head_dim=8, mlp=32, rope_theta=1e4, experts=4,
        experts_per_token=2, tie_embeddings=True,
    )  # fmt: skip
    base = dataclasses.replace(run, model=model, batch_size=16, mesh=MeshSizes(), layout=LayoutChoice(preset="single"))
    base = dataclasses.replace(base, data=dataclasses.replace(run.data, sequence_length=256))
    balanced = dataclasses.replace(model, routing=dataclasses.replace(model.routing, balance=0.01))
    for sizes, wanted in ((model, 4), (balanced, 1)):
        assert assemble(dataclasses.replace(base, model=sizes), jax.devices()[:1]).options.microbatches == wanted


@pytest.mark.slow
def test_what_only_some_layouts_have_is_kept_by_name_on_none_that_has_it_not():
    """A run that keeps gathered experts goes on where nothing is gathered; a model without experts has none."""
    options = {"model.family": "mixtral", "model.experts": "2", "model.experts_per_token": "2", "mesh.data": "1"}
    keep = {"remat.policy": "saved", "remat.names": "mlp_rows,expert_weights,far_rows"}
    mixture, dense = load_run("tiny", {**options, **keep}), load_run("tiny", {"mesh.data": "1", **keep})
    program = step_program(assemble(mixture, jax.devices()[:1]))
    check_marks(mixture, program)
    with pytest.raises(UserError, match="`remat.names` can list only names that the model marks"):
        check_marks(dense, program)


def test_a_models_types_do_not_depend_on_the_layout_around():
    """They are kept by the model's configuration alone."""
    config = dataclasses.replace(tiny().model, vocab=33)
    with Layout(make_mesh(data=3, devices=jax.devices()[:3]), params={"embed": "data"}):  # does not divide 64
        model = model_types(config)
    assert all(leaf.sharding is None for leaf in jax.tree.leaves(model))


def test_a_model_has_what_the_trainer_looks_for(monkeypatch):
    """Under another name the layers would be in no pipeline, and their vectors would be taken for matrices."""
    config = dataclasses.replace(tiny().model, vocab=31)
    monkeypatch.setattr(Llama, "unembedding", property(lambda self: self.embedding * 0.5))
    with pytest.raises(UserError, match=r"(?s)must be one of its parameters.*f32\[vocab=31 embed=64\], which is comp"):
        model_types(config)
    stack = Stacked.init
    renamed = lambda make, axis, **more: stack(make, Axis("blocks", axis.size), **more)
    monkeypatch.setattr(Stacked, "init", staticmethod(renamed))
    with pytest.raises(UserError, match=r"(?s)along an axis of the name `layers`.*2 of them along `blocks`"):
        model_types(config)
