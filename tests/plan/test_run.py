"""Plans of Trellis's own runs: the recipes on slices and nodes, the search, the page, and the command."""

import dataclasses
import functools
import json
import re
import types

import pytest

from tests.plan.small import SMALL, small
from trellis.commands.line import main
from trellis.errors import UserError
from trellis.frozen import FrozenMap
from trellis.hardware.chips import target
from trellis.hardware.described import described_devices
from trellis.inspect import Memory
from trellis.inspect.work import ANEW
from trellis.nn.moe.dispatch import WORDS
from trellis.pages.plan import page
from trellis.plan.adapt import adapt, data_sizes
from trellis.plan.advice import advice
from trellis.plan.candidate import Candidate
from trellis.plan.frontier import frontier_text, why_lost, why_won
from trellis.plan.prepared import prepare
from trellis.plan.quick import quick_plan
from trellis.plan.search import Found, best, search, variants
from trellis.plan.sketch import Sketch
from trellis.plan.text import as_json, text
from trellis.recipes import load_run


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe, on, options",
    [
        ("llama_8b_v5e_256", "v5e:16x16", {}),
        ("llama_8b_v5e_256", "v5e:16x16", {"data.sequence_length": "4096"}),  # its loss goes in pieces
        ("llama_8b", "4x8xH100", {"microbatches": "1", "batch_size": "64"}),
        ("llama_70b", "32x8xH100", {"batch_size": "512"}),
    ],
)
def test_recipes_are_planned_without_devices(recipe, on, options):
    run = load_run(recipe, options)
    plan = quick_plan(run, target(on))
    billions = {"llama_8b": 8.03, "llama_70b": 70.55}[re.match(r"llama_\d+b", recipe)[0]]
    assert plan.parameters / 1e9 == pytest.approx(billions, abs=0.01)
    per_token = 6 * plan.parameters - 6 * run.model.vocab * run.model.embed  # the table is looked up
    attention = 6 * run.model.layers * run.model.heads * run.model.head_dim * run.data.sequence_length
    assert plan.model_flops == pytest.approx((per_token + attention) * plan.tokens, rel=0.01)
    assert 0.2 < plan.mfu < 0.8
    assert {line.label for line in plan.times.lines} >= {"GatedMlp gate, up", "GatedMlp down", "Attention q, k, v"}


@pytest.mark.slow
def test_state_of_a_sharded_run_is_exact():
    plan = quick_plan(small(), target("v5e:2x2"))
    matrices = plan.parameters - 5 * 256  # norm scales are vectors
    assert plan.memory.bytes_of("parameters") == pytest.approx(matrices * 4 / 4, rel=0.01)
    assert plan.memory.bytes_of("optimizer") == pytest.approx(2 * matrices * 4 / 4, rel=0.01)


@pytest.mark.slow
def test_tables_on_tpus_are_cut_into_whole_tiles():
    words = {"layout__preset": "data", "layout__params__vocab": "data", "layout__params__embed": "data"}
    run = small(model__vocab="1001", **words)
    for on, rows in (("v5e:2x2", 1024), ("4xH100", 1004)):  # 4 x 8 divides the one, 4 the other
        prog = prepare(run, target(on), described_devices(target(on)))
        assert prog.state.model.embedding.shape["vocab"] == rows
        weights = 2 * 1001 * 256 + 2 * (256 * (2 * 4 + 2 * 2) * 64 + 3 * 256 * 512) + (2 * 2 + 1) * 256
        assert quick_plan(run, target(on)).parameters == weights  # without the rows that fill the tiles


@pytest.mark.slow
def test_tensor_parallelism_moves_activations():
    plan = quick_plan(small(mesh__model="2", layout__preset="fsdp_tensor"), target("v5e:2x2"))
    assert set(plan.ledger.per_axis()) == {"data", "model"}
    lines = [line for line in plan.times.lines if line.axes == ("model",) and line.num_bytes > 1e6]
    assert lines and all(line.label.startswith("activations") and line.hidden == 0 for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("on", ["v5e:2x2", "4xH100"])
@pytest.mark.parametrize("kind", ["ring", "gather", "exchange"])
def test_slices_of_positions_are_attended_to_by_kernels(on, kind):
    run = small(mesh__context="2", layout__preset="auto", layout__context=kind, data__sequence_length="1024")
    times = quick_plan(run, target(on)).times.lines
    assert {line.where for line in times if line.kind == "attention"} >= {"forward", "backward"}


@pytest.mark.slow
def test_options_hide_communication():
    run, on = small(batch_size="64"), target("v5p:2x2x1")  # of two sides
    slow, offload = quick_plan(run, on).seconds, "xla_tpu_enable_sparse_core_collective_offload"
    names = [f"{offload}_all_gather", f"{offload}_2d_all_gather"]
    off = quick_plan(dataclasses.replace(run, compiler_options=FrozenMap(dict.fromkeys(names, "false"))), on)
    assert quick_plan(run, on, options=names).seconds < slow == off.seconds
    assert {quick_plan(run, on, options=[name]).seconds for name in names} == {slow}


@pytest.mark.slow
def test_what_does_not_fit_is_said_with_a_way_out():
    plan = quick_plan(load_run("llama_70b", {"batch_size": "64", "microbatches": "1"}), target("8xH100"))
    assert not plan.fits
    words = text(plan)
    assert "DOES NOT FIT" in words
    assert any("--remat.policy" in line or "slice them over more devices" in line for line in advice(plan))


def waiting(plan):
    """The advice about tokens that a step waits for on their way to experts."""
    (found,) = (line for line in advice(plan) if "tokens on their way to experts" in line)
    return found


@pytest.mark.slow
def test_tokens_cross_hosts_once_for_each_of_their_experts():
    options = {"mesh.expert": "64", "mesh.expert_y": "1", "model.routing.interleave": "1"}
    found = waiting(quick_plan(load_run("deepseek_v3", options), target("64x8xH100")))
    assert "--mesh.expert_y 8 --mesh.expert 8" in found


@pytest.mark.slow
def test_tokens_cross_hosts_beside_others_or_in_eight_bits():
    """Each is advised where it is not done: neither for the recipe as it is, with `test_recipes`."""
    options = {"model.routing.interleave": "1", "model.routing.dispatch": "null"}
    plan = quick_plan(load_run("deepseek_v3", options), target("64x8xH100"))
    beside, narrow = "(--model.routing.interleave 2)", "(--model.routing.dispatch mxfp8)"
    assert f"{beside}; tokens in eight bits {narrow}; fewer" in waiting(plan)

    def with_rows(**changes):
        rows = tuple(dataclasses.replace(row, **changes) for row in plan.ledger.rows)
        return dataclasses.replace(plan, ledger=dataclasses.replace(plan.ledger, rows=rows))

    assert beside not in waiting(with_rows(parts=2)) and narrow in waiting(with_rows(parts=2))
    assert beside in waiting(with_rows(dtype=WORDS)) and narrow not in waiting(with_rows(dtype=WORDS))


@pytest.mark.slow
def test_what_compilers_lay_out_anew_before_kernels_read_it():
    """Widths of experts gathered from slices that fill no tiles, on TPUs; not their numbers, nor on GPUs."""
    experts = {"model.embed": "192", "model.experts": "8", "model.mlp": "384", "mesh.data": "8"}
    run = load_run("mixtral_8x7b", {name: value for name, value in SMALL.items() if "." in name} | experts)
    by_width = dataclasses.replace(run, layout=dataclasses.replace(run.layout, params=FrozenMap(experts="")))
    anew = lambda run, on: [p for p in quick_plan(run, target(on)).work if p.alone == ANEW]
    assert not anew(run, "v5p:2x2x2") and not anew(by_width, "8xH100")
    on_gpus = [quick_plan(each, target("8xH100")).seconds for each in (run, by_width)]
    assert on_gpus[1] == pytest.approx(on_gpus[0], rel=1e-3)  # kernels read what comes together as it lies
    plan = quick_plan(by_width, target("v5p:2x2x2"))
    assert {piece.direction for piece in anew(by_width, "v5p:2x2x2")} == {"forward", "recomputed"}
    assert len(anew(by_width, "v5p:2x2x2")) == 6  # of three weights, in both passes
    assert "laid out anew" in text(plan, formulas=True)
    assert any("slice them by number" in line for line in advice(plan))


@pytest.mark.slow
def test_text_and_json_agree():
    plan = quick_plan(small(), target("v5e:2x2"), price=2.0)
    words, values = text(plan, formulas=True), as_json(plan)
    json.dumps(values)
    assert values["step_seconds"] == plan.seconds and values["memory"]["peak"] == plan.memory.peak
    assert sum(values["memory"]["kinds"].values()) == values["memory"]["peak"]
    assert "llama.py:" in words and "B/s" in words and "$" in words
    assert "FLOP/s" in text(quick_plan(load_run("llama_84m"), target("8xH100")), formulas=True)
    assert "ring" in words or "line of 2 on side 0" in words


def test_a_batch_that_does_not_divide():
    with pytest.raises(UserError) as error:
        quick_plan(small(batch_size="30"), target("v5e:2x4"))
    assert "The batch must split evenly over the mesh axes of `batch` and into microbatches." in str(error.value)
    assert "batch_size=30 over data=8\n" in str(error.value)
    assert "use --batch_size 24 or 32" in str(error.value)


def test_a_mesh_that_does_not_tile():
    with pytest.raises(UserError, match="use data=4 model=2"):
        quick_plan(small(mesh__data="8", mesh__model="2"), target("v5e:2x4"))


def test_data_axes_follow_the_torus():
    assert data_sizes(256, target("v5e:16x16")) == {"data": 16, "data_y": 16}
    assert data_sizes(512, target("v5p:8x8x8")) == {"data": 8, "data_y": 8, "data_z": 8}
    assert data_sizes(64, target("v5p:8x8x8")) == {"data": 8, "data_y": 8}
    assert data_sizes(128, target("v5p:8x8x8")) == {"data": 128}
    assert data_sizes(8, target("8xH100")) == {"data": 8}


def test_variants_divide():
    run, on = small(), target("v5e:2x4")
    seen = list(variants(run, on))
    assert len(seen) > 10
    for variant, _ in seen:
        sizes, layout = variant.mesh, variant.layout
        data = sizes.data * sizes.data_y * sizes.data_z
        assert data * sizes.model * sizes.context * sizes.stage == 8
        parts = variant.parts if sizes.stage == 1 else layout.pipeline_microbatches
        assert 32 % (data * parts) == 0
        assert run.model.layers >= sizes.stage * layout.pipeline_groups
        assert run.model.kv_heads % sizes.model == 0


@pytest.mark.slow
def test_a_search_plans_stages_and_says_what_they_cost():
    found = search(small(model__layers="4"), target("v5e:2x4"), most=6)
    staged = [c for c in found.candidates if c.run.mesh.stage > 1]
    assert staged and all(c.plan is not None and c.plan.schedule.stages == c.run.mesh.stage for c in staged)
    words = staged[0].words()
    assert "--mesh.stage" in words and "--layout.pipeline_microbatches" in words
    shown = text(staged[0].plan)
    assert "  stages  " in shown and "of the ticks" in shown


@pytest.mark.slow
def test_a_search_tries_a_layer_a_group_and_says_why_the_winner_wins():
    run, on = load_run("llama_70b_v5p_512", {}), target("v5p:8x8x8")
    tried = [(v.mesh.stage, v.layout.pipeline_groups) for v, _ in variants(run, on)]
    assert {groups for stages, groups in tried if stages == 4} == {1, 2, 3, 4, 5, 10, 20}
    assert len(tried) < 6000
    odd = dataclasses.replace(run, model=dataclasses.replace(run.model, layers=78))
    assert any(v.mesh.stage == 4 for v, _ in variants(odd, on)), "of 78 layers two stages have one less"
    found = searched()
    assert why_won(found).startswith("it wins ") and why_won(found) in frontier_text(found)


@functools.cache
def searched():
    return search(small(), target("v5e:2x2"), most=4)


@pytest.mark.slow
def test_search_finds_the_fastest_that_fits():
    found = searched()
    assert found.winner is not None and found.winner.fits
    planned = [c for c in found.candidates if c.plan is not None]
    assert found.winner.seconds == min(c.seconds for c in planned if c.fits)
    for candidate in found.frontier:
        assert not any(o.seconds < candidate.seconds and o.peak < candidate.peak for o in planned)
    words = frontier_text(found)
    assert "variants sketched" in words and "the fastest that fits" in words
    again = quick_plan(load_run("llama_8b", SMALL | dict(found.winner.options)), target("v5e:2x2"))
    assert again.seconds == found.winner.seconds  # the options to paste are the winner


@pytest.mark.slow
def test_the_winner_is_pasted_after_the_recipe_as_written():
    """Also where the recipe was fitted to the target first, and the batch and mesh that it won with are the fitted."""
    where, model = target("v5e:4x4"), {name: value for name, value in SMALL.items() if name.startswith("model.")}
    written = load_run("llama_8b", model)
    run, notes = adapt(dataclasses.replace(written, batch_size=8), where, model)
    assert len(notes) == 2
    found = search(run, where, written=dataclasses.replace(written, batch_size=8), most=3)
    options = dict(found.winner.options)
    assert options["batch_size"] == "16"
    assert load_run("llama_8b", model | {"batch_size": "8"} | options) == found.winner.run
    words = found.winner.words().split()
    pairs = dict(zip(words[::2], words[1::2]))
    pasted = load_run("llama_8b", model | {name.removeprefix("--"): value for name, value in pairs.items()})
    assert quick_plan(pasted, where).seconds == found.winner.seconds


def test_offloading_is_searched_where_no_stages_are():
    seen = {(v.mesh.stage, v.remat.policy) for v, _ in variants(small(remat__policy="offload"), target("v5e:2x4"))}
    assert (1, "offload") in seen and (2, "saved") in seen and (2, "offload") not in seen


def test_kept_names_are_searched():
    kept = {variant.remat.names for variant, _ in variants(small(), target("v5e:2x2"))}
    operands = ("query", "key", "value", "attention")
    assert kept == {(), ("attention",), operands, (*operands, "mlp_up")}
    own = small(remat__policy="saved", remat__names="mlp_gate")
    assert ("mlp_gate",) in {variant.remat.names for variant, _ in variants(own, target("v5e:2x2"))}


def test_hosts_may_hold_a_copy_each():
    seen = {(v.mesh.replica, v.layout.preset) for v, _ in variants(small(), target("4x4xH100")) if v.mesh.model == 1}
    assert (4, "hybrid") in seen and (1, "fsdp") in seen


@pytest.mark.slow
def test_the_runs_own_setting_is_compared_with():
    among = small(mesh__data="2", mesh__data_y="2", microbatches="4")
    found = [c for c in search(among, target("v5e:2x2"), most=1).candidates if c.options == {}]
    assert len(found) == 1
    own = small(layout__preset="data")  # which no variant has
    assert "data" in {c.layout for c in search(own, target("8xH100"), most=1).candidates}


MOE = {
    "model.family": "mixtral", "model.experts": "4", "model.experts_per_token": "2", "model.embed": "256",
    "model.layers": "2", "model.heads": "4", "model.kv_heads": "2", "model.head_dim": "64", "model.mlp": "512",
    "model.vocab": "1024", "data.sequence_length": "256", "batch_size": "32", "remat.policy": "full",
}  # fmt: skip


@pytest.mark.slow
def test_experts_are_planned_and_searched():
    """What counts for MFU is what a token's own experts cost, however they are spread and however large the buffers."""
    run, where = load_run("llama_8b", MOE), target("v5e:2x2")
    spread = load_run("llama_8b", MOE | {"mesh.data": "2", "mesh.expert": "2"})
    plans = [quick_plan(r, where) for r in (run, spread)]
    assert plans[0].model_flops == plans[1].model_flops
    assert set(plans[1].ledger.per_axis()) >= {"data", "expert"}
    one = 3 * 256 * 512
    rest = plans[0].parameters - 2 * 4 * one - 1024 * 256 - 5 * 256  # the table is looked up; norms are vectors
    per_token = 6 * (rest + 2 * 2 * one) + 6 * 2 * 4 * 64 * 256
    assert plans[0].model_flops == pytest.approx(per_token * plans[0].tokens, rel=1e-6)
    sizes = {variant.mesh.expert for variant, _ in variants(run, where)}
    assert sizes == {1, 2, 4}
    assert {variant.mesh.expert for variant, _ in variants(small(), where)} == {1}
    large = {"model.experts": "128", "batch_size": "128"}
    many = small(**{key.replace(".", "__"): value for key, value in (MOE | large).items()})
    assert max(variant.mesh.expert for variant, _ in variants(many, target("v5p:4x4x8"))) == 128  # one a device


@pytest.mark.slow
def test_of_equals_the_simplest_wins():
    def one(seconds, model, fits=True, asked=False):
        run = small(mesh__model=str(model))
        plan = dataclasses.replace(base, times=dataclasses.replace(base.times, seconds=seconds))
        if not fits:
            plan = dataclasses.replace(
                plan, memory=Memory((dataclasses.replace(plan.memory.buffers[0], num_bytes=1 << 60),))
            )
        compiled = types.SimpleNamespace(fits=True, peak=1)
        verdict = types.SimpleNamespace(seconds=seconds, compiled=compiled) if asked else None
        return Candidate(run, {}, Sketch(seconds, 0.0), plan, verdict=verdict)

    base = quick_plan(small(), target("v5e:2x2"))
    quick, simple, small_one = one(1.0, 2), one(1.005, 1), one(0.5, 1, fits=False)
    assert best([quick, simple, small_one]) is simple
    assert best([quick, one(1.02, 1)]) is quick and best([small_one]) is None
    asked = one(2.0, 2, asked=True)
    assert best([quick, asked]) is asked
    assert why_lost(simple, quick, target("v5e:2x2")) == "+0.5%: as fast, and less simple"
    by_types = dataclasses.replace(asked, plan=quick.plan)
    assert why_lost(one(1.5, 1), by_types, target("v5e:2x2")) == "+50% by types, not asked about"
    assert why_lost(one(2.0, 1), quick, target("v5e:2x2")).startswith("+100%: ")
    assert quick.speed == base.tokens and asked.speed == base.tokens / 2.0, "by the time that the compiler gives"
    assert by_types.mfu == pytest.approx(quick.mfu / 2)
    assert why_won(Found(target("v5e:2x2"), 2, (simple, asked), (), asked)) == "", "of the other nobody asked"
    assert why_won(Found(target("v5e:2x2"), 2, (quick, one(2.0, 1)), (), quick)).startswith("it wins by 100.0% over ")


@pytest.mark.slow
def test_a_long_sequence_goes_around_a_ring_beside_its_kernels():
    """Of 8 slices of 32k positions; the same bytes gathered are not hidden, and keys and values are held whole."""
    changes = {"data.sequence_length": "32768", "batch_size": "8", "mesh.context": "8", "mesh.data": "1"}
    run, on = load_run("llama_8b", {**changes, "layout.preset": "auto", "microbatches": "1"}), target("8xH100")
    plans = {kind: quick_plan(dataclasses.replace(run, layout=dataclasses.replace(run.layout, context=kind)), on)
             for kind in ("ring", "gather")}  # fmt: skip
    steps = [line for line in plans["ring"].times.lines if line.kind == "permute" and "attention" in line.source]
    assert steps and sum(line.hidden for line in steps) > 0.95 * sum(line.seconds for line in steps)
    gathers = [
        line for line in plans["gather"].times.lines if line.kind == "all-gather" and "activations" in line.label
    ]
    assert gathers and all(line.hidden == 0 for line in gathers)
    assert plans["ring"].memory.peak < plans["gather"].memory.peak


@pytest.mark.slow
def test_the_search_covers_kinds_of_context_parallelism_and_names_the_one_it_takes():
    run = load_run("llama_8b", {"data.sequence_length": "32768", "batch_size": "8"})
    seen = {
        (variant.mesh.context, variant.layout.context): options for variant, options in variants(run, target("8xH100"))
    }
    assert {(8, "ring"), (8, "gather"), (8, "exchange"), (4, "exchange")} <= set(seen)
    assert seen[8, "exchange"]["layout.context"] == "exchange" and "layout.context" not in seen[8, "ring"]


@pytest.mark.slow
def test_known_good_settings():
    """FSDP alone for 8B on 64 chips with a sequence each; tensor parallelism too where a chip gets few tokens; and its
    sequence-parallel form where activations bind."""
    where = target("v5p:4x4x4")
    run = load_run("llama_8b_v5p_64", {"batch_size": "64", "data.sequence_length": "4096"})
    mesh = search(run, where, most=4).winner.run.mesh
    assert (mesh.data, mesh.data_y, mesh.data_z, mesh.model, mesh.context) == (4, 4, 4, 1, 1)
    few = load_run("llama_8b_v5p_64", {"batch_size": "16", "data.sequence_length": "2048"})
    mesh = search(few, where, most=6).winner.run.mesh
    assert (mesh.data, mesh.data_y, mesh.model, mesh.context) == (4, 4, 4, 1)
    where = target("v5e:16x16")
    large = load_run("llama_70b", {"batch_size": "64", "mesh.data": "64", "mesh.model": "4",
                                   "layout.preset": "fsdp_tensor_sequence",
                                   "remat.names": "query,key,value,attention"})  # fmt: skip
    whole = dataclasses.replace(large, layout=dataclasses.replace(large.layout, preset="fsdp_tensor"))
    assert not quick_plan(whole, where).fits
    found = search(large, where, most=4)
    assert [c.fits for c in found.candidates if not c.options] == [True]  # its own setting
    assert all(c.run.layout.preset != "fsdp_tensor" for c in found.candidates if c.fits)


@pytest.mark.slow
@pytest.mark.parametrize(
    "own",
    [{}, {"layout.mode": "auto"}, {"layout.context": "gather"}],
    ids=str,
)
def test_the_search_plans_the_runs_own_setting(own):
    """Also if it is one of those that a search does not make."""
    options = {"data.sequence_length": "8192", "batch_size": "8", "mesh.data": "2", "mesh.context": "2"}
    run = small(**options | {"layout.preset": "auto", "microbatches": "1", "remat.policy": "none"} | own)
    found = search(run, target("v5e:2x2"), most=1)
    (mine,) = [c for c in found.candidates if not c.options]
    assert (mine.run.layout, mine.run.mesh) == (run.layout, run.mesh)


def test_nothing_divides():
    with pytest.raises(UserError, match="use --batch_size 1024"):
        search(small(batch_size="3"), target("4x256xH100"))


@pytest.mark.slow
def test_the_page_is_whole_and_self_contained():
    words = page(quick_plan(small(), target("v5e:2x2")), None, searched())
    assert words.startswith("<!doctype html>")
    assert words.count("<svg") == words.count("</svg>") == 5  # slice, memory, layer, roofline, frontier
    assert "src=" not in words and "href=" not in words and "http" not in words and "<script" not in words
    assert not re.search(r"\bnan\b", words)


@pytest.mark.slow
def test_the_command(capsys, tmp_path):
    file = tmp_path / "plan.html"
    arguments = [word for name, value in SMALL.items() for word in (f"--{name}", value)]
    assert main(["plan", "llama_8b", "--on", "v5e:2x2", *arguments, "--json", "--page", str(file)]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["plan"]["devices"] == 4 and values["plan"]["fits"]
    assert file.read_text().startswith("<!doctype html>")
    assert main(["plan", "llama_8b", "--on", "v5e:3x3", *arguments]) == 2
    assert "Similar: v5e:" in capsys.readouterr().err
