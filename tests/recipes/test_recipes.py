import dataclasses
import functools
import inspect
from pathlib import Path

import jax
import pytest
import yaml

from tests.benchmarks.script import load as script_of
from trellis.errors import UserError
from trellis.hardware.chips import target
from trellis.plan.advice import advice
from trellis.plan.quick import quick_plan
from trellis.plan.search import search
from trellis.recipes import RECIPES, hardware_of, load_run, starter, tiny
from trellis.recipes.load import load
from trellis.run.config import Run
from trellis.run.folder import open_run
from trellis.run.run_file import read_run, to_yaml, write_run
from trellis.run.schema import build

# Of a device's memory, by types, which the compiler's layout exceeds by a tenth at most; and of a step's time, what a
# recipe may be behind the search's winner.
ROOM, BEHIND = 0.9, 0.03
# The version that the rows were made with; another one traces some programs of mixtures otherwise.
ROWS_JAX = "0.10.2"
GOLDENS = Path(__file__).parents[1] / "goldens" / "recipes"


@pytest.mark.parametrize("name", RECIPES)
def test_golden(name, request):
    """A recipe changes on purpose: run with --regenerate and read the difference."""
    path, text = GOLDENS / f"{name}.yaml", to_yaml(RECIPES[name]())
    if request.config.getoption("--regenerate"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_there_are_no_goldens_without_a_recipe():
    assert {path.stem for path in GOLDENS.glob("*.yaml")} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_run_file_reproduces_the_run(name, tmp_path):
    run = RECIPES[name]()
    write_run(run, tmp_path / "run.yaml")
    assert read_run(tmp_path / "run.yaml") == run == load_run(str(tmp_path / "run.yaml"))
    assert run.name == name
    assert f"trellis train {name}" in inspect.getdoc(RECIPES[name]) or "trellis plan" in inspect.getdoc(RECIPES[name])


def test_a_file_based_on_a_recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: tiny\nsteps: 7\noptimizer: {learning_rate: 3e-4}\nschedule: constant\n")
    run = load_run(str(path), {"seed": "5"})
    assert (run.steps, run.seed, run.optimizer.learning_rate, run.model) == (7, 5, 3e-4, tiny().model)
    assert run.schedule.kind == "constant" and run.schedule.warmup_steps == tiny().schedule.warmup_steps


@pytest.mark.slow
def test_every_recipe_is_a_whole_run():
    for name, recipe in RECIPES.items():
        assert build(Run, yaml.safe_load(to_yaml(recipe()))) == recipe(), name
    assert RECIPES["starter"] is starter


@pytest.mark.parametrize(
    ("target", "text", "message"),
    [
        (
            "tinny",
            None,
            [
                "A run must be a recipe, a YAML file or a run's folder.",
                "`tinny`",
                "the first argument",
                "did you mean `tiny`?",
            ],
        ),
        (
            "absent.yaml",
            None,
            [
                "A run's file must be readable.",
                "No such file or directory",
                "{path}",
                "use the path of a YAML file, or the name of a recipe: `trellis recipes`",
            ],
        ),
        (
            "list.yaml",
            "[1, 2]",
            ["A run's file must contain fields.", "list", "{path}", "write fields, as in steps: 100"],
        ),
        (
            "base.yaml",
            "base: tinny",
            ["The `base` of a file must be a recipe.", "base: tinny", "{path}", "did you mean `tiny`?"],
        ),
        (
            "key.yaml",
            "base: tiny\nstep: 3",
            ["`Run` has no field of this name.", "`step`", "`step` in {path}", "did you mean `steps`?"],
        ),
    ],
)
def test_errors(target, text, message, tmp_path):
    path = str(tmp_path / target) if target.endswith(".yaml") else target
    if text is not None:
        Path(path).write_text(text)
    with pytest.raises(UserError) as error:
        load_run(path)
    rule, seen, where, fix = message
    assert str(error.value) == f"{rule}\n  seen:  {seen}\n  where: {where.format(path=path)}\n  fix:   {fix}"


def test_a_folder_of_texts_is_tokenized_first(tmp_path):
    with pytest.raises(UserError) as error:
        load_run(str(tmp_path))
    assert error.value.fix == f"tokenize text first: trellis tokenize {tmp_path} --out stores/mine --train-bpe 512"
    (tmp_path / "config.json").write_text("{}")  # no texts, but a model of Hugging Face
    for use in (load_run, lambda folder: open_run(Path(folder))):
        with pytest.raises(UserError) as error:
            use(str(tmp_path))
        assert error.value.fix == f"import its model: trellis import {tmp_path}"
    copy = tmp_path / "checkpoints" / "step-00000004" / "run.yaml"
    copy.parent.mkdir(parents=True)
    write_run(tiny(), copy)
    for _ in range(2):  # it is gone, and then it is damaged
        with pytest.raises(UserError) as error:
            load_run(str(tmp_path))
        assert error.value.fix == f"copy it from a checkpoint: cp {copy} {tmp_path}"
        (tmp_path / "run.yaml").write_text("steps: [")


def test_a_file_that_is_no_yaml(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text("a: [1,\nb: 2")
    with pytest.raises(UserError, match=r"(?s)A run's file must be valid YAML.*line 2.*fix:   correct that line"):
        load_run(str(path))


@functools.cache
def planned(name):
    return quick_plan(RECIPES[name](), target(hardware_of(name)))


@pytest.fixture(scope="module")
def table():
    """`benchmarks/recipes.py`, and the rows that it made: each recipe beside what the search found."""
    script = script_of("recipes")
    return script, script.kept(script.RESULTS)


RENTED = [name for name in RECIPES if hardware_of(name)]


def test_the_search_was_asked_about_every_recipe_as_it_is_and_none_is_behind(table):
    script, rows = table
    assert list(rows) == RENTED
    assert not [name for name, row in rows.items() if not script.has_settings(row)]
    assert not [name for name, row in rows.items() if script.is_behind(row)]  # or has no room
    assert script.BEHIND == BEHIND and script.ROOM == ROOM


def test_compilers_find_room_too(table):
    script, _ = table
    compiled = script.kept(script.COMPILED, script.BY_COMPILERS)
    assert {name for name in RENTED if target(hardware_of(name)).chip.kind == "gpu"} <= set(compiled) <= set(RENTED)
    assert not [name for name, row in compiled.items() if script.has_no_room(row) or not script.has_settings(row)]


# What is advised where tokens wait on their way to experts: between hosts, and along the sides of a torus.
WAITING = {
    "deepseek_v3": "over expert_y: fewer hosts that share experts",
    "deepseek_v3_v5p_512": "a smaller --mesh.expert",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RENTED, key=lambda name: RECIPES[name]().model.experts))
def test_fits_with_room_and_the_table_has_todays_plan(name, table):
    """Where a row is another plan's, the recipe or the planner has changed: `python benchmarks/recipes.py`."""
    script, rows = table
    plan = planned(name)
    assert plan.memory.peak <= ROOM * plan.target.chip.hbm_bytes
    if jax.__version__ == ROWS_JAX:
        assert script.is_plan(rows[name], plan), (plan.seconds, plan.memory.peak / 2**30)
    if name in WAITING:
        (found,) = (line for line in advice(plan) if "tokens on their way to experts" in line)
        assert WAITING[name] in found


@pytest.mark.parametrize("family", ["mixtral_8x7b", "qwen3_30b_a3b", "gpt_oss_20b", "deepseek_v3"])
def test_mixtures_have_recipes_for_every_kind_of_hardware(family):
    chips = {target(hardware_of(name)).chip.name for name in RECIPES if name.startswith(family)}
    assert chips == {"v5p", "v6e", "h100", "b200"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_1b", "llama_70b_v5p_512"])
def test_is_what_the_search_finds(name):
    best = search(RECIPES[name](), target(hardware_of(name)), most=3).roomy(ROOM)
    assert planned(name).seconds <= (1 + BEHIND) * best.seconds


def test_recipes_for_rented_hardware_say_which():
    assert [name for name in RECIPES if name not in RENTED] == ["starter", "tiny"]


@pytest.mark.parametrize(
    ("options", "preset", "noted"),
    [
        ({"mesh.context": "8"}, "auto", "context"),
        ({"mesh.data": "2", "mesh.model": "4"}, "auto", "model"),
        ({"mesh.data": "4"}, "fsdp", None),
        ({"mesh.model": "1"}, "fsdp", None),
        ({"mesh.context": "8", "layout.compute.pos": "context"}, "fsdp", None),
        ({"mesh.model": "8", "layout.preset": "fsdp_tensor"}, "fsdp_tensor", None),
        ({"mesh.model": "8", "layout.overlap": "mlp,heads"}, "auto", "model"),
        ({"mesh.data": "8", "layout.compute.batch": ""}, "fsdp", None),
    ],
)
def test_a_mesh_axis_that_is_named_gets_a_layout_that_uses_it(options, preset, noted):
    loaded = load("llama_8b", options)
    assert loaded.run.layout.preset == preset and loaded.given == frozenset(options)
    said = f"layout.preset fsdp -> auto, which uses the mesh axis {noted}; --layout.preset sets it"
    assert loaded.notes == ((said,) if noted else ())


def test_a_mesh_axis_that_a_file_names_gets_one_too(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: llama_8b\nmesh: {context: 8}\n")
    assert load(str(path), {}).run.layout.preset == "auto"
    path.write_text("base: llama_8b\nmesh: {context: 8}\nlayout: {preset: fsdp}\n")
    assert load(str(path), {}).run.layout.preset == "fsdp"


def test_a_runs_folder_stands_for_its_file(tmp_path):
    write_run(tiny(), tmp_path / "run.yaml")
    assert load_run(str(tmp_path), {"steps": "30"}) == dataclasses.replace(tiny(), steps=30)


def test_a_folder_in_a_run_is_not_taken_for_texts(tmp_path):
    (tmp_path / "run.yaml").write_text("base: tiny")
    (inner := tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match=f"use the run's folder: {tmp_path}"):
        load_run(str(inner))
    assert load_run(str(tmp_path)) == load_run("tiny")
