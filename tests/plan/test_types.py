"""Work, memory and communication of a step that is written in plain JAX, against closed forms."""

import dataclasses

import jax
import pytest

from tests.plan.plain import Config, abstract_mesh, build, num_parameters, traced
from trellis.hardware.chips import target
from trellis.hardware.local import local_target
from trellis.plan.links import place
from trellis.plan.memory import memory
from trellis.plan.program import program
from trellis.plan.quick import plan_step
from trellis.plan.roofline import padded, roles, times
from trellis.plan.trace import ledger_of
from trellis.plan.work import operations
from trellis.recipes import load_run

CONFIG = Config()


def ledger(step, mesh):
    with jax.sharding.use_abstract_mesh(mesh):
        return ledger_of(step)


def products(config, tokens):
    """FLOPs of a forward pass: every weight but the table, and the whole square of scores (masked, not skipped)."""
    weights = num_parameters(config) - config.vocab * config.embed - config.layers * 2 * config.embed
    scores = 2 * 2 * config.layers * config.heads * config.head_dim * config.seq
    return tokens * (2 * weights + scores)


@pytest.mark.parametrize("sizes, placing", [({"data": 4}, {}), ({"data": 2, "model": 2}, {"model": "model"})])
def test_flops_are_exact(sizes, placing):
    step = traced(CONFIG, abstract_mesh(**sizes), **placing)
    devices = 4
    by_pass = {}
    for op in operations(step):
        by_pass[op.direction] = by_pass.get(op.direction, 0) + op.flops * op.times
    expected = products(CONFIG, CONFIG.batch * CONFIG.seq) / devices
    unembed = 2 * CONFIG.batch * CONFIG.seq * CONFIG.embed * CONFIG.vocab / devices
    down = 2 * CONFIG.batch * CONFIG.seq * CONFIG.layers * CONFIG.embed * CONFIG.mlp / devices
    assert by_pass["forward"] == expected
    assert by_pass["backward"] == 2 * expected
    assert by_pass["recomputed"] == expected - unembed - down  # the last product of a layer is not needed again
    assert by_pass["update"] == 0


def test_nothing_is_computed_again_without_a_checkpoint():
    again = traced(dataclasses.replace(CONFIG, policy="dots"), abstract_mesh(data=4))
    some = sum(op.flops * op.times for op in operations(again) if op.direction == "recomputed")
    full = sum(
        op.flops * op.times for op in operations(traced(CONFIG, abstract_mesh(data=4))) if op.direction == "recomputed"
    )
    assert 0 < some < full  # scores have batch dimensions and are made again


def test_work_names_its_line():
    found = [op for op in operations(traced(CONFIG, abstract_mesh(data=4))) if op.kind == "product"]
    assert all(op.source.startswith("plain.py:") for op in found)
    assert found == sorted(found, key=lambda op: op.order)


def test_state_is_exact_and_activations_scale_with_layers():
    mesh = abstract_mesh(data=4)
    found = memory(traced(CONFIG, mesh))
    norms = 4 * CONFIG.layers * 2 * CONFIG.embed  # replicated
    sharded = 4 * (num_parameters(CONFIG) - CONFIG.layers * 2 * CONFIG.embed) // 4
    assert found.kinds["parameters"] == sharded + norms
    assert found.kinds["optimizer"] == 2 * (sharded + norms)
    assert sum(found.kinds.values()) == found.peak
    assert sum(buffer.num_bytes for buffer in found.buffers) == found.peak
    deep = memory(traced(dataclasses.replace(CONFIG, layers=64), mesh))
    stack = 64 * CONFIG.batch // 4 * CONFIG.seq * CONFIG.embed * 2
    assert deep.kinds["kept activations"] >= stack
    assert deep.kinds["kept activations"] < 1.2 * stack


def test_keeping_more_needs_more():
    mesh = abstract_mesh(data=4)
    deep = dataclasses.replace(CONFIG, layers=16)
    assert memory(traced(dataclasses.replace(deep, policy="dots"), mesh)).peak > 1.3 * memory(traced(deep, mesh)).peak


def test_memory_falls_with_more_devices():
    peaks = [memory(traced(dataclasses.replace(CONFIG, batch=32), abstract_mesh(data=n))).peak for n in (1, 4, 16)]
    assert peaks[0] > peaks[1] > peaks[2]


def test_roles_of_collectives():
    mesh = abstract_mesh(data=2, model=2)
    step = traced(CONFIG, mesh, model="model")
    found = roles(step)
    rows = ledger(step, mesh).rows
    by_axis = {}
    for row in rows:
        by_axis.setdefault(row.axis, set()).add(found.get((row.source, row.payload), "activations"))
    assert by_axis["model"] == {"activations"}
    assert "weights" in by_axis["data"]


def test_hidden_communication_costs_nothing_and_no_more_than_there_is_room():
    mesh = abstract_mesh("tpu", data=16)
    large = dataclasses.replace(CONFIG, embed=2048, mlp=8192, heads=16, kv_heads=8, head_dim=128, seq=1024)
    step = traced(large, mesh)
    links = place({"data": 16}, target("v5e:4x4"))
    ops, moves, role = operations(step), ledger(step, mesh), roles(step)
    alone = times(ops, moves, links, role)
    hidden = times(ops, moves, links, role, ["gathers", "reductions"])
    assert hidden.seconds < alone.seconds
    assert hidden.hidden <= hidden.computation
    assert hidden.seconds == pytest.approx(hidden.computation + hidden.exposed)
    assert sum(hidden.by_bound().values()) == pytest.approx(hidden.seconds)


def test_padding_of_narrow_products():
    assert padded((10, 128, 256), 128) == 1.0
    assert padded((10, 64, 100), 128) == pytest.approx(2 * 1.28)


def test_plan_of_a_plain_step():
    mesh = abstract_mesh("tpu", data=16)
    step = traced(dataclasses.replace(CONFIG, batch=16), mesh)
    plan = plan_step(step, ledger(step, mesh), target("v5e:4x4"), name="plain", price=1.2)
    assert plan.parameters == num_parameters(CONFIG)
    assert plan.fits and 0 < plan.mfu < 1
    assert plan.model_flops == 3 * products(CONFIG, 16 * CONFIG.seq)
    assert plan.tokens_per_second == 16 * CONFIG.seq / plan.seconds
    dollars = 1.2 * 16 * plan.seconds / 3600 / (16 * CONFIG.seq) * 1e9
    assert plan.dollars_per_billion_tokens == pytest.approx(dollars)


def test_the_plain_step_runs():
    """The step that the planner is tested on is a real one."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    step, state, batch = build(CONFIG, mesh)
    with jax.set_mesh(mesh):
        compiled = jax.jit(step).lower(state, batch).compile()
    assert compiled.cost_analysis()["flops"] > 0


@pytest.mark.parametrize(("layers", "merged"), [(2, True), (17, False)])
def test_what_is_computed_again_in_a_loop_over_microbatches(layers, merged):
    """Once, by XLA on a CPU, where both passes are in one body; up to 16 layers are written out there."""
    changes = {
        "model.layers": str(layers), "batch_size": "4", "microbatches": "2", "remat.policy": "full",
        "layout.preset": "single", "data.sequence_length": "32",
    }  # fmt: skip
    here = jax.devices()[:1]
    step = program(load_run("tiny", changes), local_target(here), here).traced()
    again = [op for op in operations(step) if op.direction == "recomputed" and op.kind == "product"]
    assert again
    assert {op.looped for op in again} == {not merged}
