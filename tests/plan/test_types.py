"""Work, memory and communication of a step that is written in plain JAX, against closed forms."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tests.plan.plain import Config, abstract_mesh, build, num_parameters, traced
from tests.plan.small import SMALL, small
from trellis.hardware.chips import target
from trellis.hardware.described import described_devices
from trellis.hardware.local import local_target
from trellis.inspect.ledger import ledger_of
from trellis.inspect.memory import memory_of
from trellis.inspect.work import work
from trellis.pages.plan import page
from trellis.plan.advice import advice
from trellis.plan.links import links_of
from trellis.plan.prepared import prepare
from trellis.plan.quick import plan_program, plan_step, quick_plan
from trellis.plan.roofline import padded, times
from trellis.plan.text import particulars, stages_chart, text
from trellis.recipes import load_run

CONFIG = Config()


def products(config, tokens):
    """FLOPs of a forward pass: every weight but the table, and the whole square of scores (masked, not skipped)."""
    weights = num_parameters(config) - config.vocab * config.embed - config.layers * 2 * config.embed
    scores = 2 * 2 * config.layers * config.heads * config.head_dim * config.seq
    return tokens * (2 * weights + scores)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("sizes, placing", [({"data": 4}, {}), ({"data": 2, "model": 2}, {"model": "model"})])
def test_flops_are_exact(sizes, placing):
    step = traced(CONFIG, abstract_mesh(**sizes), **placing)
    devices = 4
    by_pass = {}
    for op in work(step):
        by_pass[op.direction] = by_pass.get(op.direction, 0) + op.flops * op.times
    expected = products(CONFIG, CONFIG.batch * CONFIG.seq) / devices
    unembed = 2 * CONFIG.batch * CONFIG.seq * CONFIG.embed * CONFIG.vocab / devices
    down = 2 * CONFIG.batch * CONFIG.seq * CONFIG.layers * CONFIG.embed * CONFIG.mlp / devices
    assert by_pass["forward"] == expected
    assert by_pass["backward"] == 2 * expected
    assert by_pass["recomputed"] == expected - unembed - down  # the last product of a layer is not needed again
    assert by_pass["update"] == 0


@pytest.mark.slow
def test_nothing_is_computed_again_without_a_checkpoint():
    again = traced(dataclasses.replace(CONFIG, policy="dots"), abstract_mesh(data=4))
    some = sum(op.flops * op.times for op in work(again) if op.direction == "recomputed")
    full = sum(
        op.flops * op.times for op in work(traced(CONFIG, abstract_mesh(data=4))) if op.direction == "recomputed"
    )
    assert 0 < some < full  # scores have batch dimensions and are made again


def test_work_names_its_line():
    found = [op for op in work(traced(CONFIG, abstract_mesh(data=4))) if op.kind == "product"]
    assert all(op.source.startswith("plain.py:") for op in found)
    assert found == sorted(found, key=lambda op: op.number)


@pytest.mark.slow
def test_state_is_exact_and_activations_scale_with_layers():
    mesh = abstract_mesh(data=4)
    found = memory_of(traced(CONFIG, mesh))
    norms = 4 * CONFIG.layers * 2 * CONFIG.embed  # replicated
    sharded = 4 * (num_parameters(CONFIG) - CONFIG.layers * 2 * CONFIG.embed) // 4
    assert found.bytes_of("parameters") == sharded + norms
    assert found.bytes_of("optimizer") == 2 * (sharded + norms)
    assert sum(found.per_kind().values()) == found.peak == sum(buffer.num_bytes for buffer in found.buffers)
    deep = memory_of(traced(dataclasses.replace(CONFIG, layers=64), mesh))
    stack = 64 * CONFIG.batch // 4 * CONFIG.seq * CONFIG.embed * 2
    assert deep.bytes_of("activations") >= stack
    assert deep.bytes_of("activations") < 1.2 * stack


@pytest.mark.slow
def test_keeping_more_needs_more():
    mesh = abstract_mesh(data=4)
    deep = dataclasses.replace(CONFIG, layers=16)
    assert (
        memory_of(traced(dataclasses.replace(deep, policy="dots"), mesh)).peak
        > 1.3 * memory_of(traced(deep, mesh)).peak
    )


@pytest.mark.slow
def test_memory_falls_with_more_devices():
    peaks = [memory_of(traced(dataclasses.replace(CONFIG, batch=32), abstract_mesh(data=n))).peak for n in (1, 4, 16)]
    assert peaks[0] > peaks[1] > peaks[2]


def test_roles_of_collectives():
    rows = ledger_of(traced(CONFIG, abstract_mesh(data=2, model=2), model="model")).rows
    kinds = {(row.axis, row.kind, row.role) for row in rows if row.payload > 4}
    assert {role for axis, _, role in kinds if axis == "model"} == {"activations"}
    assert {(kind, role) for axis, kind, role in kinds if axis == "data"} == {
        ("all-gather", "weights"), ("reduce-scatter", "gradients"), ("all-reduce", "gradients"),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 3])
def test_stages_gather_weights_and_keep_activations_however_many_layers_they_have(layers):
    run = load_run("tiny", {"mesh.stage": "2", "model.layers": str(layers)})
    plan = quick_plan(run, target("2x4xH100"))
    gathers = [row for row in plan.ledger if row.kind == "all-gather" and row.axes == ("data",) and row.dtype == "f32"]
    assert gathers and {row.role for row in gathers} == {"weights"}
    stacks = [b for b in plan.memory.buffers if b.name == "carry between layers" and b.what.startswith("f32[3 ")]
    assert len(stacks) > 20 and {b.kind for b in stacks} == {"activations"}  # three slots
    assert plan.memory.largest() in plan.memory.kept_by_name()


@pytest.mark.slow
def test_a_page_says_of_stages_what_the_text_says():
    plan = quick_plan(load_run("tiny", {"mesh.stage": "2", "model.layers": "3"}), target("2x4xH100"))
    words = page(plan)
    assert all(f"{name.capitalize()}: {said}." in words for name, said in particulars(plan))
    assert len(particulars(plan)) == 2 and stages_chart(plan) in words


@pytest.mark.slow
def test_the_formula_of_a_line_is_of_its_longest_piece():
    plan = quick_plan(small(), target("v5e:2x2"))
    assert not any(line.formula.startswith("1 x 8 B") and line.seconds > 1e-6 for line in plan.times.lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on", "options", "why"),
    [
        ("v5e:2x2", {"data__sequence_length": "200"}, "multiples of 128, not pos=200 and key_pos=200"),
        ("4xH100", {"precision__compute": "float32"}, "bfloat16 and float16, not float32"),
        ("v5e:2x2", {}, ""),
    ],
)
def test_a_plan_says_why_attention_has_no_kernel(on, options, why):
    plan = quick_plan(small(**options), target(on))
    said = [line for line in advice(plan) if line.startswith("attention does without its kernel: ")]
    assert len(said) == len(plan.refused) == bool(why) and all(line.endswith(why) for line in said)


@pytest.mark.slow
def test_the_loss_reduces_a_gradient_and_layers_wait_for_it():
    """On TPUs, where a fence keeps the unembedding's gradient before the layers' backward pass."""
    plan = quick_plan(small(), target("v5e:2x2"))
    (row,) = [r for r in plan.ledger if "next_token.py" in r.source and r.kind == "reduce-scatter"]
    assert (row.role, row.awaited, row.parameter) == ("gradients", True, "model.head")


def test_hidden_communication_costs_nothing_and_no_more_than_there_is_room():
    large = dataclasses.replace(CONFIG, embed=2048, mlp=8192, heads=16, kv_heads=8, head_dim=128, seq=1024)
    step = traced(large, abstract_mesh("tpu", data=16))
    links = links_of({"data": 16}, target("v5e:4x4"))
    pieces, moves = work(step), ledger_of(step)
    alone = times(pieces, moves, links)
    hidden = times(pieces, moves, links, ["gathers", "reductions"])
    assert hidden.seconds < alone.seconds
    assert hidden.hidden <= hidden.computation
    assert hidden.seconds == pytest.approx(hidden.computation + hidden.exposed)
    assert sum(hidden.by_bound().values()) == pytest.approx(hidden.seconds)


@pytest.mark.slow
@pytest.mark.parametrize(("on", "kind", "share"), [("8xH100", "gpu", 0.5), ("v5e:2x4", "tpu", 0.0)])
def test_what_moves_one_of_two_parts_is_hidden_but_for_one(on, kind, share):
    """On GPUs, whose compiler was seen to do it."""
    large = dataclasses.replace(CONFIG, embed=2048, mlp=8192, heads=16, kv_heads=8, head_dim=128, seq=1024)
    step = traced(large, abstract_mesh(kind, data=2, model=4), model="model")
    links, found = links_of({"data": 2, "model": 4}, target(on)), ledger_of(step)
    in_parts = [dataclasses.replace(row, parts=2) if row.role == "activations" else row for row in found.rows]
    alone, beside = times(work(step), found, links), times(work(step), dataclasses.replace(found, rows=in_parts), links)
    of_parts = sum(line.seconds for line in alone.lines if line.role == "activations")
    assert of_parts > 0 and alone.exposed - beside.exposed == pytest.approx(share * of_parts)


def test_padding_of_narrow_products():
    assert padded((10, 128, 256), 128) == 1.0
    assert padded((10, 64, 100), 128) == pytest.approx(2 * 1.28)


@pytest.mark.slow
def test_plan_of_a_plain_step():
    mesh = abstract_mesh("tpu", data=16)
    step = traced(dataclasses.replace(CONFIG, batch=16), mesh)
    counted = 3 * products(CONFIG, 16 * CONFIG.seq)
    tokens = 16 * CONFIG.seq
    plan = plan_program(step, target("v5e:4x4"), name="plain", tokens=tokens, model_flops=counted, price=1.2)
    assert plan.parameters == num_parameters(CONFIG)
    assert plan.fits and 0 < plan.mfu < 1
    assert plan.model_flops == counted
    assert plan.tokens_per_second == 16 * CONFIG.seq / plan.seconds
    dollars = 1.2 * 16 * plan.seconds / 3600 / (16 * CONFIG.seq) * 1e9
    assert plan.dollars_per_billion_tokens == pytest.approx(dollars)


@pytest.mark.slow
def test_the_plain_step_runs():
    """The step that the planner is tested on is a real one."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    step, state, batch = build(CONFIG, mesh)
    with jax.set_mesh(mesh):
        compiled = jax.jit(step).lower(state, batch).compile()
    assert compiled.cost_analysis()["flops"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "merged"), [(2, True), (17, False)])
def test_what_is_computed_again_in_a_loop_over_microbatches(layers, merged):
    """Once, by XLA on a CPU, where both passes are in one body; up to 16 layers are written out there."""
    changes = {
        "model.layers": str(layers), "batch_size": "4", "microbatches": "2", "remat.policy": "full",
        "layout.preset": "single", "data.sequence_length": "32",
    }  # fmt: skip
    here = jax.devices()[:1]
    step = prepare(load_run("tiny", changes), local_target(here), here).traced()
    again = [op for op in work(step) if op.direction == "recomputed" and op.kind == "product"]
    assert again
    assert {op.looped for op in again} == {not merged}


@pytest.mark.slow
@pytest.mark.parametrize(("keeps", "again"), [("full", 2), ("dots", 2), ("saved", 0)])
def test_of_experts_only_products_before_the_gate_are_computed_again(keeps, again):
    """XLA makes no result anew that nothing reads: an expert's last product. `dots` keeps no product of a kernel."""
    where = target("1x8xH100")
    changes = {
        "mesh.data": "8", "model.layers": "1", "model.embed": "128", "model.mlp": "256", "model.vocab": "256",
        "batch_size": "8", "microbatches": "1", "data.sequence_length": "256", "remat.policy": keeps,
    }  # fmt: skip
    step = prepare(load_run("mixtral_8x7b", changes), where, described_devices(where)).traced()
    made = {
        direction: sum(op.flops * op.times for op in work(step) if (op.kind, op.direction) == ("grouped", direction))
        for direction in ("forward", "recomputed", "backward")
    }
    assert made["forward"] > 0
    assert made["recomputed"] == made["forward"] * again / 3
    assert 1.5 * made["forward"] < made["backward"] <= 2 * made["forward"]  # fewer rows complete a tile there


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["llama_8b", "mixtral_8x7b"])
def test_what_the_compiler_places_takes_about_as_much(recipe):
    """In auto mode types say nothing, but where arguments lie and constraints put results is known."""
    where = target("v5e:2x4")
    changes = SMALL | {"mesh.data": "4", "mesh.model": "2", "layout.preset": "auto"}

    def made(mode):
        step = prepare(load_run(recipe, changes | {"layout.mode": mode}), where, described_devices(where)).traced()
        flops = sum(op.flops * op.times for op in work(step) if op.kind in ("product", "grouped", "attention"))
        return flops, memory_of(step), ledger_of(step)

    (flops, memory, ledger), (by_types, wanted, moves) = made("auto"), made("explicit")
    assert flops == by_types
    for kind in ("parameters", "optimizer", "batch"):
        assert memory.bytes_of(kind) == wanted.bytes_of(kind)
    assert memory.peak == pytest.approx(wanted.peak, rel=0.2)
    for axis, total in moves.per_axis().items():
        assert total <= ledger.per_axis()[axis] < 3 * total


@pytest.mark.slow
def test_a_tables_gradient_is_there_beside_the_sum_that_it_is_cast_from():
    """Of a long vocabulary that is the highest point: 964 MiB as libtpu 0.0.42 lays it out, of which types left the
    cast gradient out, a fifth."""
    sizes = {"model.vocab": "200000", "model.layers": "1", "batch_size": "8", "data.sequence_length": "512"}
    held = quick_plan(load_run("llama_84m", sizes | {"mesh.data": "2", "mesh.data_y": "4"}), target("v6e:2x4")).memory
    assert [buffer.num_bytes for buffer in held.buffers[:2]] == [200000 * 512 * 4, 200000 * 512 * 2]
    assert held.peak == pytest.approx(963.5 * 2**20, rel=0.05)


@pytest.mark.parametrize("on", ["1xH100", "v5e:1x1"])
def test_a_step_on_plain_arrays_is_planned_for_one_device(on):
    step = lambda w, x: w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    plan = plan_step(step, jnp.ones((8, 8)), jnp.ones((4, 8)), target(on), name="own", tokens=4, model_flops=6 * 256)
    assert not plan.ledger.rows
    assert text(plan).startswith(f"own on {on}: 1 device\n")
    assert "1 device;" in page(plan)
