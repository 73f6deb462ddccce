"""Plans of what is asked for by hand: what is kept and where, loads, meshes that do not divide; and what is refused."""

import dataclasses
import json
import re

import pytest

from tests.plan.small import SMALL, small
from trellis.commands.line import main
from trellis.errors import UserError
from trellis.hardware.chips import target
from trellis.pages.plan import page
from trellis.pages.plan_pictures import timeline_picture
from trellis.plan.adapt import adapt
from trellis.plan.advice import advice
from trellis.plan.frontier import why_lost
from trellis.plan.quick import quick_plan
from trellis.plan.search import search, variants
from trellis.plan.text import as_json, link_table, text
from trellis.recipes import load_run


@pytest.mark.slow
def test_what_is_offloaded_takes_the_hosts_memory_and_its_time():
    kept, plans = {}, {}
    for policy in ("full", "saved", "offload"):
        plans[policy] = plan = quick_plan(small(remat__policy=policy, batch_size="256"), target("8xH100"))
        kept[policy] = sum(b.num_bytes for b in plan.memory.kept if b.kind == "activations")
    found = plans["offload"]
    assert kept["offload"] == kept["full"] < kept["saved"]
    assert found.memory.host == kept["saved"] - kept["full"] and plans["saved"].memory.host == 0
    assert found.memory.peak < plans["saved"].memory.peak
    copies = [line for line in found.times.lines if line.kind == "host copy"]
    assert {line.where for line in copies} == {"forward", "recomputed"}
    for line in copies:
        assert line.num_bytes == found.memory.host
        assert line.seconds == pytest.approx(found.memory.host / 64e9, rel=0.01)
    assert 0 < sum(line.hidden for line in copies) < sum(line.seconds for line in copies)
    assert found.times.seconds == pytest.approx(found.times.computation + found.times.exposed)
    assert "in the host's memory:" in text(found) and as_json(found)["memory"]["host"] == found.memory.host


@pytest.mark.slow
def test_copies_to_the_host_are_moves():
    """On the page, in what a search says of a variant, and in what a plan advises."""
    run, on = small(remat__policy="offload", batch_size="256"), target("8xH100")
    plan = quick_plan(run, on)
    waited = sum(line.seconds - line.hidden for line in plan.times.copies)
    (advised,) = [words for words in advice(plan) if "the host's memory" in words]
    assert advised.startswith(f"{waited / plan.seconds:.0%} of the step waits for the host's memory: keep fewer")
    kept, moved = str(timeline_picture(quick_plan(small(batch_size="256"), on))), str(timeline_picture(plan))
    assert "host copy, Llama layers: " in moved and "that nothing hides" in moved and "host copy" not in kept

    found = search(run, on, most=4)
    (lost,) = {why_lost(c, found.winner, on) for c in found.candidates if c.keeps == "offload" and c.parts == 1}
    assert lost.endswith("more copying to and from the host's memory")
    assert "host copy" in str(page(plan, found=found))


@pytest.mark.slow
@pytest.mark.parametrize(("on", "devices"), [("8xH100", 8), ("v5p:2x2x2", 8), ("1xH100", 1)])
def test_attention_is_kept_by_its_name(on, devices):
    """Its result and the log of its sums, and its forward pass is not made again."""
    full, kept = (
        quick_plan(small(remat__policy=p, remat__names=n, mesh__data=str(devices)), target(on))
        for p, n in (("full", ""), ("saved", "attention"))
    )
    made_again = lambda plan: [x for x in plan.times.lines if (x.kind, x.where) == ("attention", "recomputed")]
    assert made_again(full) and not made_again(kept)
    rows, heads = 32 // devices * 256, 4
    by_name = {b.name: b.num_bytes for b in kept.memory.kept_by_name()}
    assert by_name["attention"] == 2 * rows * heads * (64 * 2 + 4)


@pytest.mark.slow
def test_an_odd_length_is_attended_to_in_chunks_on_gpus():
    kinds = lambda length: {
        x.kind for x in quick_plan(small(data__sequence_length=length), target("8xH100")).times.lines
    }
    assert "attention" in kinds("254") and "attention" not in kinds("255")


@pytest.mark.slow
def test_names_that_the_model_does_not_mark_are_refused():
    with pytest.raises(UserError, match="`remat.names` can list only names that the model marks") as error:
        quick_plan(small(remat__policy="saved", remat__names="qury"), target("8xH100"))
    assert (error.value.seen, error.value.where, error.value.fix) == ("`qury`", "remat.names", "did you mean `query`?")


@pytest.mark.slow
def test_a_search_looks_at_meshes_that_divide_alone():
    """Neither 6 nor 3 devices slice 256 channels: the model has three copies, each over two devices."""
    run, _ = adapt(small(batch_size="48"), target("6xH100"), set())
    found = search(run, target("6xH100"), most=4)
    refused = [c.refused for c in found.candidates if c.refused]
    assert refused == ["Mesh axes must divide the axis that they slice."], "the run's own"
    assert found.winner.run.mesh.replica == 3 and found.winner.fits


def test_a_search_says_why_no_mesh_divides():
    with pytest.raises(UserError, match="Mesh axes must divide the axis that they slice"):
        search(small(model__mlp="511", layout__params__mlp="data", layout__params__embed=""), target("8xH100"), most=4)


@pytest.mark.slow
def test_a_search_of_what_cannot_be_planned_says_why(tmp_path, capsys):
    """It is refused on every mesh, and not for want of memory."""
    delayed = ["--precision.products", "{experts: fp8}", "--precision.amax_history", "2"]
    sizes = [f"--{name}={value}" for name, value in SMALL.items()]
    asked = ["--search", "--page", str(tmp_path / "plan.html")]
    assert main(["plan", "mixtral_8x7b", "--on", "4xh100", *sizes, *delayed, *asked]) == 2
    said = capsys.readouterr()
    assert "one that can be planned.\n  seen:  Delayed scales cannot be used in pipeline stages" in said.err
    assert "nothing fits" not in said.out


@pytest.mark.slow
def test_a_page_of_a_search_that_plans_nothing_is_refused(tmp_path, capsys):
    """The run has no plan on its own mesh, and on every other one its later steps do not fit."""
    hardware, page = tmp_path / "chips.yaml", tmp_path / "plan.html"
    hardware.write_text("pico: {like: h100, hbm_gib: 0.003, source: here}", encoding="utf-8")
    sizes = ["--mesh.model", "3", "--mesh.data", "1", "--batch_size", "24", "--lengths", "[{step: 10, length: 128}]"]
    asked = ["--search", "--json", "--page", str(page)]
    assert main(["plan", "tiny", "--on", "3xpico", "--hardware", str(hardware), *sizes, *asked]) == 2
    said = capsys.readouterr()
    count = len(json.loads(said.out)["search"]["candidates"])
    assert f"seen:  none of the {count} settings that the search tried can be planned\n" in said.err
    assert "beside each, or leave --page out" in said.err and not page.exists()


@pytest.mark.slow
def test_what_narrow_products_bring(tmp_path, capsys):
    """Of each alone; A100s have no units for fp8, and gain by int8 what rounding does not take."""
    page = tmp_path / "plan.html"
    narrow = ["--precision.products", "{mlp: fp8, heads: int8}", "--model.layers", "1"]
    assert main(["plan", "llama_8b", "--on", "8xh100", *narrow, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    found = {each["part"]: each["without"] / said["plan"]["step_seconds"] for each in said["narrow"]}
    assert found["mlp"] > 1.02
    assert main(["plan", "llama_8b", "--on", "8xa100", *narrow, "--page", str(page)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^mlp +fp8 .* more time.*: leave --precision.products.mlp out$", out, re.M)
    assert "leave --precision.products.mlp out" in page.read_text(encoding="utf-8")
    assert main(["plan", "tiny", "--on", "8xa100"]) == 0
    assert "narrow products" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("other", ["heads: mxfp8", "vocab: fp8"])
def test_narrow_products_that_alone_have_histories_of_scales_are_left_out_with_them(capsys, other):
    narrow = ["--precision.products", f"{{mlp: fp8, {other}}}", "--precision.amax_history", "4", "--model.layers", "1"]
    assert main(["plan", "tiny", "--on", "1xh100", *narrow, "--json"]) == 0
    assert [each["part"] for each in json.loads(capsys.readouterr().out)["narrow"]] == ["mlp", other.split(":")[0]]


@pytest.mark.parametrize(
    "words, seen, where, fix",
    [
        ("--price nan", "nan", "--price", "use --price 1.20"),
        ("--load inf", "inf", "--load", "use 1 for an even load, 1.5 for half as many rows more"),
        ("--load 2", "2, no experts", "--load", "leave it out"),
        ("--load 2 --search", "2, no experts", "--load", "leave it out"),
        ("--compile --against x --bound nan", "nan", "--bound", "use --bound 2"),
        ("--compile --bound 1", "no --against", "--bound", "use --compile --against FILE"),
        ("--search --top 2", "--top 2 without --search --compile", "--top", "use --search --compile --top 3"),
        ("--search --compile --top 0", "--top 0", "--top", "use --search --compile --top 3"),
        ("--precision.products {mlp:int8}", "null", "--precision.products", "write a space after the colon"),
        ("--devices 2", "2 devices on v5e:2x2", "--devices", "leave it out"),
        ("--on 8xH100 --devices 4", "4 devices on 8xH100", "--devices", "leave it out, or use --on 4xH100"),
    ],
)
def test_numbers_that_mean_nothing(words, seen, where, fix, capsys):
    assert main(["plan", "tiny", "--on", "v5e:2x2", *words.split()]) == 2
    found = re.findall(r"(?:seen|where|fix): +(.*)", capsys.readouterr().err)
    assert found == [seen, where, fix]


@pytest.mark.slow
def test_the_fullest_device_has_all_rows_at_most(capsys):
    mixture = [
        "plan",
        "mixtral_8x7b",
        "--on",
        "8xH100",
        "--mesh.data",
        "1",
        "--mesh.expert",
        "8",
        "--model.layers",
        "1",
    ]
    assert main([*mixture, "--load", "9"]) == 2
    assert "seen:  9, experts over 8 devices" in capsys.readouterr().err
    assert main([*mixture, "--load", "8"]) == 0
    small = "plan tiny --on v5e:2x2 --model.family mixtral --model.experts 6 --model.experts_per_token 2 --load 1.5"
    assert main(small.split()) == 2
    assert "fix:   leave it out, or use --mesh.expert 2\n" in capsys.readouterr().err
    assert main([*small.split(), "--mesh.expert", "2"]) == 0
    assert main([*small.split(), "--load", "9"]) == 2
    assert "fix:   leave it out, or use --mesh.expert 2 --load 2\n" in capsys.readouterr().err


@pytest.mark.slow
def test_advice_on_products_and_on_activations_can_be_followed():
    """Products in float32 are slow at any width, and positions that are sliced already are not to be sliced again."""
    sizes = {"batch_size": "256", "mesh.model": "2", "model.embed": "256", "layout.preset": "fsdp_tensor_sequence"}
    plan = quick_plan(load_run("tiny", sizes), target("v5e:2x4"))
    found = "\n".join(advice(plan))
    assert "are products in float32, at 17% of bfloat16's rate: --precision.compute bfloat16" in found
    assert "too small to fill" not in found
    assert "over model: use less of it (--mesh.model 1), or --layout.overlap mlp,heads\n" in found
    auto = quick_plan(load_run("tiny", sizes | {"layout.mode": "auto"}), target("v5e:2x4"))
    by_types = "over model: use less of it (--mesh.model 1), or --layout.mode explicit --layout.overlap mlp,heads\n"
    assert by_types in "\n".join(advice(auto)) and auto.ledger.chosen in link_table(auto) and not plan.ledger.chosen
    wide = dataclasses.replace(plan, work=tuple(dataclasses.replace(p, dtype="bfloat16") for p in plan.work))
    assert "in float32" not in "\n".join(advice(wide))
    small = [dataclasses.replace(piece, dtype="bfloat16", dims=(8, 8, 8)) for piece in plan.work if any(piece.dims)]
    found = "\n".join(advice(dataclasses.replace(plan, work=tuple(small))))
    assert "too small to fill the matrix units, most of it " in found
    assert found.endswith(": a wider model, or wider heads, or less tensor parallelism (--mesh.model 1)")


@pytest.mark.slow
def test_what_four_bits_take_is_not_said_to_be_too_small():
    """Blocks of 16 numbers are turned before they are rounded to four bits: no wider model has larger ones."""
    sizes = {"model.layers": "4", "precision.products": "{mlp: nvfp4, attention: nvfp4}"}
    plan = quick_plan(load_run("llama_8b", sizes), target("8xB200"))
    assert "too small to fill" not in "\n".join(advice(plan))
    eight = (dataclasses.replace(piece, dtype=piece.dtype.replace("float4", "float8")) for piece in plan.work)
    assert "too small to fill" in "\n".join(advice(dataclasses.replace(plan, work=tuple(eight))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "advised"),
    [
        ({"mesh.model": "4"}, "use less of it (--mesh.model 2), or --layout.overlap mlp,heads"),
        (
            {"mesh.context": "4", "data.sequence_length": "1024"},
            "use less of it (--mesh.context 2), or --layout.context gather, or --layout.context exchange",
        ),
    ],
)
def test_more_tokens_do_not_help_activations_that_cross_the_network(sizes, advised):
    """They move as many more."""
    axis = next(iter(sizes)).partition(".")[2]
    said = "\n".join(advice(quick_plan(small(**sizes, batch_size="64"), target("4x2xH100"))))
    assert f" of the step waits for activations over {axis}, the network between hosts or slices: {advised}" in said
    assert f"{advised}, or a copy of the model on each host (--layout.preset hybrid)" in said


@pytest.mark.slow
def test_a_larger_batch_is_advised_for_memory_bandwidth_if_it_reads_weights_for_more_tokens():
    """Here elementwise work reads activations, and as much more of them."""
    plans = [quick_plan(small(batch_size=str(size)), target("v5e:2x2")) for size in (32, 64)]
    first, share = plans[0], [plan.times.by_bound()["memory"] / plan.seconds for plan in plans]
    assert 0.3 < share[0] < share[1]
    said = lambda *tried: [line for line in advice(first, *tried) if "memory bandwidth" in line]
    assert said(lambda options: plans[1], "--batch_size 64") == [] and len(said()) == 1
    fewer = dataclasses.replace(plans[1], times=dataclasses.replace(plans[1].times, lines=()))
    assert said(lambda options: fewer, "--batch_size 64")[0].endswith("each weight for more tokens (--batch_size 64)")


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_not_advised_to_take_more():
    """Neither more tokens nor, of what is faster, anything that takes more memory."""
    plan = quick_plan(small(batch_size="64"), target("4x2xH100"))
    chip = dataclasses.replace(plan.target.chip, hbm_bytes=plan.memory.peak / 2)
    full = dataclasses.replace(plan, target=dataclasses.replace(plan.target, chip=chip))
    assert not full.fits and any("more tokens a device" in line for line in advice(plan))
    faster = dataclasses.replace(full, tokens=2 * plan.tokens)
    larger = dataclasses.replace(faster, memory=quick_plan(small(batch_size="128"), target("4x2xH100")).memory)
    said = lambda new: "\n".join(advice(full, lambda options: new, "--batch_size 128"))
    assert "more tokens" not in said(faster) + said(larger) + "\n".join(advice(full))
    assert "keep weights inside (--layout.preset hybrid)" in said(faster) and "hybrid" not in said(larger)


@pytest.mark.slow
def test_more_tokens_are_advised_if_they_make_the_step_faster():
    plan = quick_plan(small(batch_size="64"), target("4x2xH100"))
    faster = dataclasses.replace(plan, tokens=2 * plan.tokens)
    said = lambda new: "\n".join(advice(plan, lambda options: new, "--batch_size 128"))
    assert "more tokens a device (--batch_size 128)" in said(faster) and "more tokens" not in said(plan)


@pytest.mark.slow
@pytest.mark.parametrize(("copies", "advised"), [("1", "--layout.preset hybrid"), ("2", "--mesh.replica 4"), ("4", "")])
def test_a_copy_on_each_host_is_advised_unless_each_has_one(copies, advised):
    plan = quick_plan(small(batch_size="64", mesh__replica=copies), target("4x2xH100"))
    said = "\n".join(line for line in advice(plan) if "the network between hosts or slices" in line)
    assert said and ("keep weights inside" in said) == bool(advised) and advised in said


@pytest.mark.slow
def test_muons_repeated_products_are_told_with_a_mesh_that_shares_them():
    sizes = {"optimizer.kind": "muon", "mesh.data": "8", "model.layers": "2", "model.embed": "512", "batch_size": "8"}
    plans = {}

    def planned(options=""):
        words = options.split()
        given = {name[2:]: value for name, value in zip(words[::2], words[1::2])}
        return plans.setdefault(options, quick_plan(load_run("tiny", sizes | given), target("v5e:2x4")))

    (said,) = (line for line in advice(planned(), planned) if "products of whole matrices" in line)
    option = "--mesh.data 4 --mesh.data_y 2 --mesh.data_z 1"
    assert said.endswith(f"a mesh axis that does not divide the layers repeat: use axes that do ({option})")
    assert plans[option].seconds * 1.01 < planned().seconds


@pytest.mark.slow
def test_tables_whose_slices_end_within_a_tile_are_turned():
    """To look words up and to add gradients to them, on TPUs alone. Sliced by words they lie as they are read."""
    sizes = {"model.vocab": "65536", "model.embed": "256", "model.layers": "1", "batch_size": "8"}
    plan = lambda on="v5e:2x4", **more: quick_plan(load_run("tiny", sizes | more), target(on))
    by_words = {"layout.preset": "data", "layout.params": "{vocab: data, embed: data}"}
    turned = lambda plan: [(piece.direction, piece.num_bytes) for piece in plan.work if piece.alone == "turned"]
    found = plan()
    assert turned(found) == [(way, 2 * 65536 * 256 * 4) for way in ("forward", "backward")]
    assert turned(plan(**by_words)) == turned(plan("8xH100")) == []
    (said,) = (line for line in advice(found) if "turns tables" in line)
    assert said.endswith("(--layout.preset data --layout.params.vocab data --layout.params.embed data)")


@pytest.mark.slow
def test_options_are_advised_if_they_are_accepted_and_help():
    sizes = {"mesh.model": "2", "layout.preset": "fsdp_tensor_sequence"}
    plan = quick_plan(load_run("tiny", sizes), target("v5e:2x4"))
    overlap, less = "--layout.overlap mlp,heads", "--mesh.model 1"
    faster = dataclasses.replace(plan, tokens=2 * plan.tokens)

    def waits(plans):
        def planned(options):
            if options in plans:
                return plans[options]
            raise UserError("An option must be known.", seen=options, where=options, fix="leave it out")

        return [line for line in advice(plan, planned) if "over model" in line]

    assert waits({}) == waits({overlap: plan, less: plan}) == []
    assert waits({overlap: faster})[0].endswith(f"over model: {overlap}")
    assert waits({overlap: plan, less: faster})[0].endswith(f"over model: use less of it ({less})")


@pytest.mark.slow
def test_what_a_plan_advises_is_tried(capsys):
    """Overlap would take longer here, and is not advised; it is accepted, since its preset follows from the mesh."""
    command = ["plan", "llama_84m", "--on", "v5e:2x4", "--mesh.model", "2", "--model.layers", "2", "--json"]
    seconds = []
    for more in ([], ["--layout.overlap", "mlp,heads"], ["--mesh.model", "1"]):
        assert main([*command, *more]) == 0
        found = json.loads(capsys.readouterr().out)["plan"]
        seconds.append(found["step_seconds"])
        if not more:
            (waits,) = (line for line in found["advice"] if "over model" in line)
    assert ("--layout.overlap" in waits) == (seconds[1] * 1.01 < seconds[0])
    assert ("--mesh.model 1" in waits) == (seconds[2] * 1.01 < seconds[0])


def test_a_search_leaves_rings_out_where_no_positions_are_sliced():
    sizes = {"mesh__model": "2", "layout__preset": "auto", "layout__overlap": "mlp,heads"}
    kept = {True: 0, False: 0}
    for variant, options in variants(small(**sizes), target("v5e:2x2")):
        rings = bool(variant.layout.overlap)
        assert rings == (variant.mesh.model > 1 and variant.layout.preset != "fsdp_tensor")
        assert options.get("layout.overlap") == (None if rings else "")
        kept[rings] += 1
    assert all(kept.values())
    dotted = {name.replace(".", "__"): value for name, value in options.items()}
    assert small(**sizes | dotted).layout == variant.layout


@pytest.mark.slow
@pytest.mark.parametrize("own", [{"accumulation": "sharded", "microbatches": "2"}, {"remat__policy": "offload"}])
def test_a_search_refuses_no_variant_for_what_only_the_run_itself_has(own):
    """Accumulation of several parts, and a policy that no stage can have."""
    run, where = small(**own), target("v5e:2x2")
    found = search(run, where, most=1)
    assert found.sketched == sum(1 for _ in variants(run, where)) and not any(c.refused for c in found.candidates)


@pytest.mark.slow
@pytest.mark.parametrize("later", ["", ", batch_size: 16"])
def test_what_a_search_finds_holds_for_every_length(capsys, later):
    """The later steps decide, with half or twice the sequences; what is pasted is about the run as it was written."""
    where, options = target("8xH100"), {"lengths": f"[{{step: 10, length: 128{later}}}]"}
    written = load_run("tiny", options)
    fitted, _ = adapt(written, where, ("lengths",))
    found = search(fitted, where, written=written, start=10, most=2)
    assert found.winner is not None and found.winner.run.data.sequence_length == 128
    for candidate in found.candidates:
        pasted = load_run("tiny", options | dict(candidate.options))
        assert pasted.batch_size == fitted.batch_size and pasted.at(10).remat == candidate.run.remat
        assert adapt(pasted, where, ("lengths", "batch_size", *candidate.options))[0] == pasted
        assert all(quick_plan(phase.run, where).fits for phase in pasted.phases())


@pytest.mark.slow
def test_a_search_goes_on_where_the_compiler_refuses_a_setting(monkeypatch):
    def refuses(run, where, progress):
        raise RuntimeError("the compiler for v5e:2x2 refused the step: no room in vector memory\nmore lines")

    monkeypatch.setattr("trellis.plan.compile.compile_run", refuses)
    found = search(small(), target("v5e:2x2"), most=3, compile_best=1)
    refused = [c for c in found.candidates if c.refused]
    said = [why_lost(c, found.winner, found.target) for c in refused]
    assert said == ["the compiler for v5e:2x2 refused the step: no room in vector memory"] * 2
    assert found.winner is not None and found.winner not in refused


@pytest.mark.slow
@pytest.mark.parametrize("asked", [True, False, "for one side"])
def test_compiler_options_are_advised_if_something_is_not_hidden_for_want_of_them(asked):
    sizes = {"model.layers": "2", "mesh.data": "8", "mesh.data_y": "1", "batch_size": "8", "scan_layers": "false"}
    run = load_run("llama_8b_v6e_256", sizes | {"data.sequence_length": "1024"})
    if asked is not True:
        kept = {k: v for k, v in run.compiler_options.items() if asked and "2d_" not in k}
        run = dataclasses.replace(run, compiler_options=kept)
    plan = quick_plan(run, target("v6e:2x4"))
    (said,) = (line for line in advice(plan) if "waits for weights and gradients over data" in line)
    assert "more tokens a device" in said
    assert ("compiler options that move them under computation" in said) is (asked is not True)
    assert ("need one with `2d_all_gather`" in said) is (asked is not True)  # over both sides of 2x4
