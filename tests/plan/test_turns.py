"""What a turn of a loop waits for, where it moves beside what it computes."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.plan.plain import Config, abstract_mesh, traced
from trellis.hardware.chips import target
from trellis.inspect.ledger import ledger_of
from trellis.inspect.work import work
from trellis.pages.plan import page
from trellis.plan.links import links_of
from trellis.plan.quick import plan_step, quick_plan
from trellis.plan.roofline import times
from trellis.plan.text import text
from trellis.plan.turns import Sent, turns_of, waits
from trellis.program import trace
from trellis.recipes import load_run

BOTH = ["gathers", "reductions"]


def gather(key, seconds, read):
    return Sent(key, seconds, made=-1, read=read, is_gathered=True)


def summed(key, seconds, made):
    return Sent(key, seconds, made=made, read=made, is_gathered=False)


@pytest.mark.parametrize(
    ("sent", "waited"),
    [
        ([gather("a", 2.0, read=1)], {"a": 2.0}),  # by what computes first: nothing is before it
        ([gather("a", 2.0, read=2)], {"a": 1.0}),
        ([gather("a", 2.0, read=3)], {"a": 0.0}),
        ([gather("b", 2.0, read=3), gather("a", 2.0, read=1)], {"a": 2.0, "b": 0.0}),  # as they are read; b under 2
        ([gather("a", 2.0, read=1), gather("b", 9.0, read=3)], {"a": 2.0, "b": 6.0}),
        ([summed("a", 3.0, made=1)], {"a": 0.0}),  # under what is computed after it
        ([summed("a", 3.0, made=3)], {"a": 3.0}),
        ([summed("a", 3.0, made=2), summed("b", 6.0, made=3)], {"a": 2.0, "b": 4.0}),  # one after the other: 6 late
        ([gather("a", 9.0, read=3), summed("b", 2.0, made=1)], {"a": 6.0, "b": 0.0}),  # links are busy until 9
    ],
)
def test_what_a_turn_waits_for(sent, waited):
    assert dict(waits([(2, 2.0), (1, 1.0), (3, 4.0)], sent)) == pytest.approx(waited)


def test_a_turn_waits_as_long_as_it_takes_longer():
    """Every collective takes what is hidden of it, and what is waited for."""
    sent = [gather(0, 5.0, read=2), gather(1, 1.0, read=3), summed(2, 3.0, made=2), summed(3, 4.0, made=3)]
    found = waits([(1, 1.0), (2, 2.0), (3, 4.0)], sent)
    assert all(0 <= found[each.key] <= each.seconds for each in sent)
    # The gathers come after 5 and 6 s. The second operation runs from 5 to 7 and the third to 11: 3 s of sums, then 4.
    assert sum(found.values()) == pytest.approx((5 - 1) + (11 + 4 - 11))


def step(platform="tpu"):
    config = Config(embed=2048, mlp=8192, heads=16, kv_heads=8, head_dim=128, seq=1024, layers=3)
    return traced(config, abstract_mesh(platform, data=16))


@pytest.mark.slow
def test_loops_are_those_of_layers():
    program = step()
    loops = list(turns_of(program))
    rows = [row for row in ledger_of(program).rows if row.role in ("weights", "gradients") and row.payload > 1e5]
    of_layers = [row for row in rows if row.times == 3]
    homes = [next(turns for turns in loops if row.number in turns) for row in of_layers]
    assert {home.times for home in homes} == {3} and len(set(homes)) == 2  # forward, and backward
    for row, home in zip(of_layers, homes):
        if row.role == "weights":
            assert row.number < row.read <= home.last
        else:
            assert home.first <= row.made < row.number


@pytest.mark.parametrize(("length", "unroll", "turns"), [(0, 1, []), (3, 8, [1]), (6, 2, [3])])
def test_a_loop_without_turns_is_none_and_a_turn_may_hold_more_than_there_is(length, unroll, turns):
    step = lambda x, w: lax.scan(lambda x, _: (x @ w, None), x, length=length, unroll=unroll)[0]
    assert [loop.times for loop in turns_of(trace(step, jnp.ones((8, 8)), jnp.ones((8, 8))))] == turns


def test_a_step_that_takes_no_time_is_planned():
    """Its only gather is in a loop of no turns."""
    mesh = abstract_mesh("tpu", data=4)
    w, x = (jax.ShapeDtypeStruct((32, 32), jnp.float32, sharding=NamedSharding(mesh, P("data"))) for _ in range(2))
    step = lambda w, x: lax.scan(lambda x, _: (x @ jax.reshard(w, P()), None), x, length=0)[0]
    plan = plan_step(step, w, x, target("v5e:2x2"), name="own", tokens=4, model_flops=1.0)
    plan = dataclasses.replace(plan, price=1.0)
    assert (plan.seconds, plan.mfu, plan.tokens_per_second, plan.dollars_per_billion_tokens) == (0, 0, 0, 0)
    assert "0 tokens/s" in text(plan) and "a step, predicted" in page(plan)


def test_the_branch_that_computes_most_counts_with_all_turns_of_its_loops():
    def either(i, x, w):
        long = lambda x: lax.scan(lambda x, _: (x @ w, None), x, length=100)[0]
        wide = lambda x: (x @ jnp.tile(w, (1, 2)))[:, :64]
        return lax.cond(i, long, wide, x)

    pieces = work(trace(either, jnp.bool_(True), jnp.ones((64, 64)), jnp.ones((64, 64))))
    assert sum(piece.flops * piece.times for piece in pieces) == 100 * 2 * 64**3


def test_in_loops_only_what_a_turn_computes_before_hides_a_gather():
    """What the loss computes hides none of them, and the first weight of a layer is waited for."""
    program, links = step(), links_of({"data": 16}, target("v6e:4x4"))
    pieces, moves, loops = work(program), ledger_of(program), list(turns_of(program))
    by_pass, by_turn = times(pieces, moves, links, BOTH), times(pieces, moves, links, BOTH, loops)
    assert by_pass.seconds < by_turn.seconds
    assert by_turn.seconds == pytest.approx(by_turn.computation + by_turn.exposed)
    first = min((row for row in moves.rows if row.role == "weights" and row.times == 3), key=lambda row: row.read)
    there = [
        line for line in by_turn.lines if (line.source, line.where, line.role) == (first.source, "forward", "weights")
    ]
    assert there and sum(line.hidden for line in there) < sum(line.seconds for line in there)


@pytest.mark.slow
def test_of_layers_written_out_less_is_hidden_the_more_there_is_to_hide():
    """Of what would take as long as the computation beside it, half is waited for."""

    def share(length):
        sizes = {"model.layers": "2", "mesh.data": "8", "mesh.data_y": "1", "batch_size": "8"}
        run = load_run("llama_8b_v6e_256", sizes | {"scan_layers": "false", "data.sequence_length": str(length)})
        plan = quick_plan(run, target("v6e:2x4"))
        lines = [line for line in plan.times.lines if line.role == "weights" and line.turns > 1]
        return sum(line.hidden for line in lines) / sum(line.seconds for line in lines)

    few, many = share(4096), share(8192)
    assert 0.5 <= few < 0.85 < many < 1.0


def test_types_of_mixtures_on_tpus_are_near_what_their_compiler_schedules():
    """`docs/plan.md` says how near; the table is of `benchmarks/recipes.py --compile`."""
    root = Path(__file__).parents[2]
    rows = (root / "benchmarks/results/recipes_compiled.txt").read_text().splitlines()
    mixed = [row.split() for row in rows if re.match(r"(mixtral|qwen3|gpt_oss|deepseek)\w*_v\d[pe]_", row)]
    steps = {row[0]: (float(row[7]), float(row[8])) for row in mixed}
    longer = {name: compiled / types - 1 for name, (types, compiled) in steps.items()}
    assert len(longer) == 8
    said = (root / "docs/plan.md").read_text()
    out = {name: longer.pop(name) for name in list(longer) if load_run(name).scan_layers is False}
    least, most = (choose(out, key=lambda name: out[name]) for choose in (min, max))
    assert (least, most) == ("qwen3_30b_a3b_v5p_64", "gpt_oss_20b_v5p_64")
    assert f"from {100 * out[least]:.0f} % (Qwen3 on v5p) to {100 * out[most]:.0f} % longer (GPT-OSS on v5p," in said
    assert longer["deepseek_v3_v5p_512"] == pytest.approx(1 / 5, abs=0.03)
    assert 1 - 1 / (1 + longer["deepseek_v3_v6e_1024"]) == pytest.approx(1 / 3, abs=0.03)
    assert f"Mixtral on v6e takes {100 * longer['mixtral_8x7b_v6e_64']:.0f} % longer" in said
