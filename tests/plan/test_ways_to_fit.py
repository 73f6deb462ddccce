"""What to change when a step does not fit: computed, each change planned."""

import dataclasses
import json
import shlex
import xml.etree.ElementTree as ElementTree

import pytest

from trellis.commands.line import main
from trellis.errors import UserError
from trellis.figures.numbers import size
from trellis.hardware.chips import target
from trellis.hardware.described import described_devices
from trellis.plan.advice import advice
from trellis.plan.prepared import prepare
from trellis.plan.quick import plan_of
from trellis.plan.ways_to_fit import Way, changes, excess_lines, excess_text, least, ways_to_fit
from trellis.recipes.load import load_run

HERE = target("v5e:2x2")


def run(**options):
    shape = {"data.sequence_length": "128", "model.head_dim": "64"}
    return load_run("tiny", shape | {k.replace("__", "."): v for k, v in options.items()})


def shrunk(size: int):
    """The same hardware with less memory."""
    return dataclasses.replace(HERE, chip=dataclasses.replace(HERE.chip, hbm_bytes=size))


def planned(run, where=HERE):
    return plan_of(prepare(run, where, described_devices(where)), where)


def test_changes_keep_less_then_cut_the_batch():
    words = [options for options, _ in changes(run(remat__policy="dots", batch_size="8"))]
    assert words == [
        "--remat.policy saved",
        "--remat.policy saved --remat.names query,key,value,attention,mlp_up",
        "--remat.policy saved --remat.names query,key,value,attention",
        "--remat.policy saved --remat.names attention",
        "--remat.policy full",
        "--microbatches 2",
        "--microbatches 4",
        "--microbatches 8",
        "--remat.policy full --microbatches 2",
        "--remat.policy full --microbatches 4",
        "--remat.policy full --microbatches 8",
        "--remat.policy full --batch_size 4",
        "--remat.policy full --batch_size 2",
        "--remat.policy full --batch_size 1",
    ]


@pytest.mark.slow
def test_layers_written_out_keep_less_than_a_loop():
    """The compiler of v5e lays out 14.8 GiB for the recipe's twelve layers, written out, and makes some products again;
    types say 16.3, and 43.7 in a loop."""
    shape = {"data.sequence_length": "128", "model.positions": "128", "model.embed": "128", "model.heads": "2"}
    shape |= {"model.mlp": "512", "model.layers": "3", "model.vocab": "256", "batch_size": "64"}
    asked, written = (load_run("gpt2_small", shape | more) for more in ({}, {"scan_layers": "false"}))
    out = planned(written).memory.peak
    where = shrunk(int(1.01 * out))
    plan = planned(asked, where)
    assert plan.memory.peak > 1.3 * out and least(plan, asked, written) < out
    (way,) = ways_to_fit(asked, lambda changed: planned(changed, where), most=1, plan=plan)
    assert (way.options, way.peak) == ("--scan_layers false", out)
    for other in ({"mesh.stage": "3"}, {"scan_layers": "false"}, {"remat.policy": "full"}):  # no loop, or little kept
        words = [options for options, _ in changes(load_run("gpt2_small", shape | other))]
        assert not any("scan_layers" in options for options in words)


@pytest.mark.slow
def test_every_way_fits_and_is_what_it_says():
    shape = {"batch_size": "32", "model.layers": "4"}
    asked = run(**shape, remat__policy="none")
    full = planned(run(**shape, remat__policy="full")).memory.peak
    where = shrunk(int(full * 1.06))
    ways = ways_to_fit(asked, lambda changed: planned(changed, where))
    assert [way.options for way in ways if way.peak == full] == ["--remat.policy full"]
    assert ways[0].options.startswith("--remat.policy saved --remat.names ")
    assert 1 <= len(ways) <= 3 and all(way.peak <= where.chip.hbm_bytes for way in ways)
    for way in ways:
        pairs = zip(way.options.split()[::2], way.options.split()[1::2])
        given = shape | {"remat.policy": "none"} | {name.removeprefix("--"): value for name, value in pairs}
        assert planned(run(**given), where).memory.peak == way.peak


@pytest.mark.slow
def test_nothing_fits_where_there_is_no_room():
    where = shrunk(1000)
    asked = run(batch_size="8")
    assert ways_to_fit(asked, lambda changed: planned(changed, where)) == []


def test_changes_that_do_not_divide_are_passed_over():
    def refuse(changed):
        raise UserError("A batch is split evenly.", seen="3", where="batch_size", fix="use 4")

    assert ways_to_fit(run(batch_size="8"), refuse) == []


@pytest.mark.slow
def test_the_message():
    where = shrunk(2**20)
    asked = run(batch_size="32")
    plan = planned(asked, where)
    text = excess_text(plan, [Way("--remat.policy full", 2**19, 1.0), Way("--microbatches 2", 2**18, 1.0)])
    lines = text.splitlines()
    assert lines[0].startswith("A step does not fit in a device's memory, by ")
    assert lines[1].startswith("  seen:  ") and lines[1].endswith(", 1.00 MiB on v5e:2x2")
    assert lines[2].startswith("  where: largest by name: ") and "(activations)" in lines[2]
    assert lines[3:] == ["  fix:   --remat.policy full   peak 512 KiB", "         --microbatches 2   peak 256 KiB"]
    assert excess_text(plan, []).endswith("is enough: use more devices, or a smaller model")


@pytest.mark.slow
@pytest.mark.parametrize("options, count", [({"batch_size": "4"}, 1), ({"batch_size": "16", "microbatches": "2"}, 2)])
def test_fewer_sequences_at_a_time_are_advised_if_there_are_several(options, count):
    plan = planned(run(remat__policy="none", **options), shrunk(2**20))
    assert plan.sequences == count and not plan.fits
    (kept,) = [line for line in advice(plan) if line.startswith("kept activations take")]
    assert kept.endswith(": fewer sequences at a time take less") == (count > 1)


@pytest.mark.slow
def test_where_devices_hold_copies_of_the_state_a_way_slices_it():
    wide = {"model__embed": "1024", "model__mlp": "2048", "batch_size": "4"}
    asked = run(layout__preset="data", remat__policy="full", **wide)
    state = planned(asked).memory.bytes_of("parameters", "optimizer")
    where = shrunk(0.95 * state)
    plan = planned(asked, where)
    (way,) = ways_to_fit(asked, lambda changed: planned(changed, where), most=1, plan=plan)
    assert way.options == "--layout.preset fsdp" and plan.state == state
    (line,) = excess_lines(plan, [])
    assert f" {size(state / 4)} if all slice them: use a layout or a mesh with fewer copies" in line
    words = lambda **options: [words for words, _ in changes(run(remat__policy="full", **options))]
    assert "--mesh.replica 1 --mesh.data 8" in words(mesh__replica="4", mesh__data="2")
    assert "--mesh.replica 1 --layout.preset auto" in words(mesh__replica="4", layout__preset="hybrid")
    assert not any("mesh" in each or "layout" in each for each in words())


@pytest.mark.slow
def test_names_of_what_is_kept():
    asked = run(batch_size="8", remat__policy="saved")
    held = planned(asked).memory
    names = {buffer.name for buffer in held.kept}
    assert {"query", "key", "value", "mlp_gate", "mlp_up", "carry between layers"} <= names
    kinds = held.per_kind()
    assert kinds["optimizer"] == pytest.approx(2 * kinds["parameters"], rel=0.01)


@pytest.mark.slow
def test_the_command(capsys, tmp_path):
    assert (
        main(["memory", "tiny", "--on", "v5e:2x2", "--data.sequence_length", "128", "--svg", str(tmp_path / "m.svg")])
        == 0
    )
    out = capsys.readouterr().out
    assert "kept for the backward pass, by name" in out and "largest activation: " in out
    assert "does not fit" not in out
    assert ElementTree.parse(tmp_path / "m.svg").getroot().tag.endswith("svg")
    assert main(["memory", "tiny", "--on", "v5e:2x2", "--data.sequence_length", "128", "--json"]) == 0
    assert any(buffer["name"] == "mlp_gate" for buffer in json.loads(capsys.readouterr().out)["buffers"])


def test_names_of_a_recipe_are_given_back_with_its_policy():
    """Names go with the policies saved and offload: a change of policy that leaves them is refused."""
    words = [options for options, _ in changes(run(remat__policy="saved", remat__names="attention"))]
    assert words[0] == "--remat.policy full --remat.names ''"
    assert all("--remat.names ''" in options for options in words if "--remat.policy full" in options)
    with pytest.raises(UserError, match="or --remat.names '' to keep what the policy says"):
        run(remat__policy="full", remat__names="attention")


def small_chip(tmp_path, mebibytes):
    """Options for a node of 8 GPUs with little memory."""
    file = tmp_path / "small.yaml"
    file.write_text(f"short: {{like: h100, hbm_gib: {mebibytes / 1024}, source: test}}\n")
    return ["--on", "8xshort", "--hardware", str(file)]


def planned_by_command(capsys, words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_what_fits_is_accepted_and_is_what_it_says(capsys, tmp_path):
    keeps = ["--remat.policy", "saved", "--remat.names", "mlp_up,attention"]
    command = ["plan", "tiny", *small_chip(tmp_path, 150), *keeps, "--batch_size", "2048", "--model.layers", "8"]
    found = planned_by_command(capsys, command)
    assert not found["plan"]["fits"] and len(found["ways_to_fit"]) == 2
    causes = [
        line for line in found["plan"]["advice"] if line.startswith(("kept activations take", "temporaries take"))
    ]
    assert causes and not any("--" in line for line in causes)  # options are offered where they were tried
    for way in found["ways_to_fit"]:
        plan = planned_by_command(capsys, [*command, *shlex.split(way["options"])])["plan"]
        assert (plan["memory"]["peak"], plan["step_seconds"]) == (way["peak"], way["seconds"]) and plan["fits"]


@pytest.mark.slow
def test_stages_keep_what_another_recomputation_does_not(capsys, tmp_path):
    """The plan offers what `memory` offers."""
    sizes = ["--mesh.stage", "4", "--model.layers", "8", "--batch_size", "256", "--data.sequence_length", "512"]
    command = ["tiny", *small_chip(tmp_path, 75), "--model.vocab", "256", "--remat.policy", "saved", *sizes]
    found = planned_by_command(capsys, ["plan", *command])
    kinds = found["plan"]["memory"]["kinds"]
    assert not found["plan"]["fits"] and kinds["activations"] > 0.5 * sum(kinds.values())
    assert [way["options"] for way in found["ways_to_fit"]] == ["--remat.names attention", "--remat.policy full"]
    assert main(["memory", *command]) == 0
    out = capsys.readouterr().out
    assert all(f"{way['options']}   peak " in out for way in found["ways_to_fit"])
