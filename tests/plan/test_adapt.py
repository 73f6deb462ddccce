"""Recipes on hardware that they were not written for."""

import pytest

from trellis.commands.line import main
from trellis.errors import UserError
from trellis.hardware.chips import target
from trellis.plan.adapt import DATA_AXES, adapt, fitted_mesh
from trellis.plan.quick import quick_plan
from trellis.plan.text import text
from trellis.plan.ways_to_fit import changes, excess_lines, excess_text, least, ways_to_fit
from trellis.recipes import RECIPES, hardware_of, load_run
from trellis.recipes.load import load
from trellis.run.config import MeshSizes
from trellis.run.run_file import write_run

TENSOR = {"mesh.model": "8", "layout.preset": "fsdp_tensor_sequence", "remat.policy": "full", "remat.names": ""}
# Recipe, target, mesh, batch, and whether it fits.
EIGHT = (
    ("llama_8b", "v5e:16x16", {"data": 16, "data_y": 16}, 256, False),
    ("llama_8b", "v5p:8x8x8", {"data": 8, "data_y": 8, "data_z": 8}, 512, True),
    ("llama_8b", "8xH100", {"data": 8}, 16, True),
    ("llama_8b", "4x8xH100", {"data": 32}, 32, True),
    ("llama_70b", "v5e:16x16", {"data": 32, "model": 8}, 256, False),
    ("llama_70b", "v5p:8x8x8", {"data": 8, "data_y": 8, "model": 8}, 256, True),
    ("llama_70b", "8xH100", {"model": 8}, 256, False),
    ("llama_70b", "4x8xH100", {"data": 4, "model": 8}, 256, False),
)


@pytest.mark.slow
@pytest.mark.parametrize("recipe, on, mesh, batch, fits", EIGHT)
def test_large_recipes_on_every_kind_of_hardware(recipe, on, mesh, batch, fits):
    where = target(on)
    run, notes = adapt(load_run(recipe, TENSOR if recipe == "llama_70b" else {}), where, ())
    plan = quick_plan(run, where)
    assert dict(plan.mesh) == mesh and run.batch_size == batch and plan.fits == fits
    assert plan.tokens == batch * run.data.sequence_length
    assert 0.3 < plan.mfu < 0.8
    assert any(f"batch_size 16 -> {batch} so that every device has a row" in note for note in notes) == (
        batch in (32, 256, 512) and recipe == "llama_8b"
    )
    words = text(plan, fitted=notes)
    assert all(f"  fitted      {note}" in words for note in notes)
    assert ("DOES NOT FIT" in words) != fits


def test_what_the_user_gave_stays():
    where = target("v5e:4x4")
    asked = load_run("llama_8b", {"batch_size": "24", "mesh.data": "16"})
    run, notes = adapt(asked, where, ("batch_size", "mesh.data"))
    assert run == asked and notes == []
    with pytest.raises(UserError, match="use --batch_size 16 or 32"):
        quick_plan(run, where)
    run, notes = adapt(asked, where, ("mesh.data",))
    assert run.mesh == asked.mesh and run.batch_size == 32
    assert notes == ["batch_size 24 -> 32 so that every device has a row; --batch_size N sets it"]


def test_every_microbatch_has_a_row_on_every_device():
    run, notes = adapt(load_run("llama_8b", {"microbatches": "4"}), target("8xH100"), ())
    assert run.batch_size == 32
    assert notes == ["batch_size 16 -> 32 so that every device has a row in each microbatch; --batch_size N sets it"]


def test_parts_side_by_side_have_a_row_on_every_device():
    run, notes = adapt(load_run("deepseek_v3"), target("v7x:8x8x8"), ())
    assert run.model.routing.interleave == 2 and run.batch_size == 2048
    assert any(note.startswith("batch_size 1024 -> 2048 ") for note in notes)


def test_a_batch_that_few_microbatches_divide_is_offered_these_alone():
    run = load_run("tiny", {"batch_size": "36"})
    offered = [options for options, _ in changes(run)]
    assert any("--microbatches 4" in each for each in offered) and not any("--microbatches 8" in e for e in offered)


def test_sizes_that_grow_all_divide():
    sizes = "[{step: 0, size: 8}, {step: 10, size: 40}]"
    run, notes = adapt(load_run("llama_8b", {"batch_size": sizes}), target("4x8xH100"), ())
    assert [entry.size for entry in run.batch_sizes()] == [32, 64]
    assert notes[0].startswith("batch_size 8 then 40 -> 32 then 64 ")


@pytest.mark.parametrize(
    "mesh, on, sizes",
    [
        (MeshSizes(data=16, data_y=16), "8xH100", {"data": 8}),
        (MeshSizes(data=16, data_y=16), "v5p:4x4x4", {"data": 4, "data_y": 4, "data_z": 4}),
        (MeshSizes(model=8), "4xH100", {"model": 4}),
        (MeshSizes(data=4, context=4, model=-1), "v5e:4x4", {"model": 16}),
        (MeshSizes(data=-1, context=2, context_y=2), "v5e:4x4", {"data": 4, "context": 2, "context_y": 2}),
        (MeshSizes(expert=8), "8x8xH100", {"data": 8, "expert": 8}),
    ],
)
def test_meshes_keep_what_divides(mesh, on, sizes):
    found = fitted_mesh(mesh, target(on))
    named = {name: getattr(found, name) for name in MeshSizes.__dataclass_fields__}
    assert {name: size for name, size in named.items() if size > 1} == sizes


@pytest.mark.slow
def test_what_cannot_be_enough_is_not_planned():
    where = target("4x8xH100")
    run = load_run("llama_70b", TENSOR)
    plan, tried = quick_plan(run, where), []

    def planned(changed):
        tried.append(changed)
        return quick_plan(changed, where)

    ways = ways_to_fit(run, planned, most=1, plan=plan)
    assert len(tried) <= 3 and ways
    assert least(plan, run, tried[-1]) <= ways[0].peak <= where.chip.hbm_bytes
    assert excess_lines(plan, ways)[0].startswith(f"fits with {ways[0].options}: ")


@pytest.mark.slow
def test_too_few_devices_for_the_state():
    where = target("8xH100")
    plan = quick_plan(load_run("llama_70b", TENSOR), where)
    (line,) = excess_lines(plan, [])
    assert line.startswith("parameters and optimizer alone take 98.6 GiB a device")
    assert line.endswith("use at least 10 devices of this kind")
    assert excess_text(plan, []).endswith(f"  fix:   {line}")  # of `trellis memory`


@pytest.mark.slow
def test_too_few_devices_of_a_slice():
    """Of the sizes that slices have: 8B parameters in float32 and their moments take six chips of v5e."""
    plan = quick_plan(load_run("llama_8b", {"mesh.data": "4"}), target("v5e:2x2"))
    (line,) = excess_lines(plan, [])
    assert line.endswith("use at least 8 devices of this kind"), line


@pytest.mark.slow
def test_the_command_tells_what_it_fitted(capsys, tmp_path):
    small = ["--model.layers", "2", "--model.embed", "256", "--model.mlp", "512", "--model.vocab", "512"]
    assert main(["plan", "llama_8b", "--on", "v5e:4x4", *small]) == 0
    assert "  fitted      mesh data=all -> data=4 data_y=4 so that it fills v5e:4x4" in capsys.readouterr().out
    assert main(["plan", "llama_8b", "--on", "v5e:4x4", *small, "--batch_size", "24"]) == 2
    assert "use --batch_size 16 or 32" in capsys.readouterr().err
    file = tmp_path / "mine.yaml"
    file.write_text("base: llama_8b\nbatch_size: 24\n")
    assert main(["plan", str(file), "--on", "v5e:4x4", *small]) == 2
    assert "use --batch_size 16 or 32" in capsys.readouterr().err
    assert main(["memory", "llama_8b", "--on", "v5e:4x4", *small]) == 0
    assert "  fitted      mesh" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sizes", "on", "fitted"),
    [
        ((8, 2, 4), "v6e:8x8", (8, 2, 4)),  # as written: a side may be two axes
        ((2, 4, 8), "v6e:8x8", (2, 4, 8)),
        ((4, 4, 4), "v6e:8x8", (8, 8, 1)),  # of another slice
        ((64, 1, 1), "v6e:8x8", (8, 8, 1)),
        ((8, 2, 4), "v5p:4x4x4", (4, 4, 4)),
        ((8, 8, 1), "8x8xH100", (64, 1, 1)),
    ],
)
def test_axes_of_data_that_fill_the_sides_of_a_torus_stay(sizes, on, fitted):
    found = fitted_mesh(MeshSizes(**dict(zip(DATA_AXES, sizes))), target(on))
    assert tuple(getattr(found, axis) for axis in DATA_AXES) == fitted


def test_a_runs_folder_is_fitted_as_a_recipe_is(tmp_path):
    """Its file has every field, the devices of a CPU among them, which nobody gave."""
    run = load_run("tiny", {"devices": "8", "mesh.data": "4", "mesh.model": "2"})
    write_run(run, tmp_path / "run.yaml")
    (tmp_path / "mine.yaml").write_text("base: tiny\ndevices: 8\n")
    for name in ("", "run.yaml"):
        loaded = load(str(tmp_path / name), {"batch_size": "16"})
        fitted, notes = adapt(loaded.run, target("v5e:4x4"), loaded.given)
        assert loaded.given == {"batch_size"} and (fitted.mesh.data, fitted.mesh.model) == (8, 2)
        assert notes[0].startswith("mesh data=4 model=2 -> data=8 model=2 so that it fills v5e:4x4; ")
    mine = load(str(tmp_path / "mine.yaml"), {})
    with pytest.raises(UserError, match="The number of devices cannot be set: the target determines it"):
        adapt(mine.run, target("v5e:4x4"), mine.given)
    without = load(str(tmp_path / "mine.yaml"), {"devices": "null"})
    assert adapt(without.run, target("v5e:4x4"), without.given)[0].devices is None


def test_recipes_are_planned_as_they_are_on_the_hardware_that_they_are_for():
    for name in RECIPES:
        if (on := hardware_of(name)) is not None:
            run = load_run(name)
            fitted, changes = adapt(run, target(on), ())
            assert (fitted.mesh, changes) == (run.mesh, []), name


def test_data_takes_what_a_given_axis_leaves(capsys):
    """Sizes that were given stay; the recipe's other axes keep what divides the rest."""
    where = target("4x8xH100")
    options = {"mesh.context": "2"}
    loaded = load("mixtral_8x7b", options)
    run, notes = adapt(loaded.run, where, loaded.given)
    assert (run.mesh.data, run.mesh.context) == (16, 2) and notes[0].startswith("mesh data=64 context=2 -> data=16 ")
    assert main(["plan", "tiny", "--on", "8xH100", "--mesh.data", "3"]) == 2
    refused = capsys.readouterr().err
    assert "seen:  data=3, devices=8\n  where: mesh.data\n  fix:   use --mesh.data 8\n" in refused
    assert main(["plan", "tiny", "--on", "8xH100", "--mesh.model", "3"]) == 2
    assert "fix:   use --mesh.model 1, 2, 4 or 8\n" in capsys.readouterr().err
    kept = load("llama_8b", {"mesh.data": "-1"})
    assert adapt(kept.run, target("v5e:4x4"), kept.given)[0].mesh == kept.run.mesh


@pytest.mark.parametrize(("command", "option"), [("plan", "--page"), ("memory", "--svg")])
def test_where_a_page_cannot_be_is_said_before_anything_is_planned(capsys, monkeypatch, tmp_path, command, option):
    monkeypatch.setattr("trellis.hardware.chips.target", pytest.fail)
    for where, seen in ((tmp_path / "none" / "plan.html", "No such file"), (tmp_path, "Is a directory")):
        assert main([command, "tiny", "--on", "v5e:2x2", option, str(where)]) == 2
        said = capsys.readouterr()
        assert not said.out and seen in said.err and str(where) in said.err


@pytest.mark.parametrize("command", ["plan tiny --on 8xh100 --compile --costs", "prove tiny --on 8xh100 --programs"])
def test_a_folder_to_write_to_that_is_a_file_is_said_at_once(capsys, monkeypatch, tmp_path, command):
    monkeypatch.setattr("trellis.hardware.chips.target", pytest.fail)
    (file := tmp_path / "file").write_text("")
    for where in (file, file / "inside"):
        assert main([*command.split(), str(where)]) == 2
        said = capsys.readouterr().err
        assert "seen:  Not a directory\n" in said and f"where: {file}\n" in said
