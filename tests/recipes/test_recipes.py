import inspect
from pathlib import Path

import pytest
import yaml

from trellis.errors import UserError
from trellis.hardware.chips import target
from trellis.plan.quick import quick_plan
from trellis.recipes import RECIPES, load_run, starter, tiny
from trellis.run.config import Run
from trellis.run.run_file import read_run, to_yaml, write_run
from trellis.run.schema import build

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


def test_every_recipe_is_a_whole_run():
    for name, recipe in RECIPES.items():
        assert build(Run, yaml.safe_load(to_yaml(recipe()))) == recipe(), name
    assert RECIPES["starter"] is starter


@pytest.mark.parametrize(
    ("target", "text", "message"),
    [
        ("tinny", None, ["A run is a recipe or a YAML file.", "`tinny`", "the first word", "did you mean `tiny`?"]),
        (
            "absent.yaml",
            None,
            [
                "A run's file can be read.",
                "No such file or directory",
                "{path}",
                "give the path of a YAML file, or the name of a recipe: `trellis recipes`",
            ],
        ),
        (
            "list.yaml",
            "[1, 2]",
            ["A run's file holds fields.", "list", "{path}", "write fields, as in steps: 100"],
        ),
        (
            "base.yaml",
            "base: tinny",
            ["A file is based on a recipe.", "base: tinny", "{path}", "did you mean `tiny`?"],
        ),
        (
            "key.yaml",
            "base: tiny\nstep: 3",
            ["`Run` has known fields only.", "`step`", "`step` in {path}", "did you mean `steps`?"],
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


def test_a_file_that_is_no_yaml(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text("a: [1,\nb: 2")
    with pytest.raises(UserError, match=r"(?s)A run's file is YAML.*line 2.*fix:   correct that line"):
        load_run(str(path))


@pytest.mark.parametrize(
    ("name", "hardware"),
    [
        ("gpt2_small", "8xA100"),
        ("llama_84m", "8xA100"),
        ("llama_270m", "8xA100"),
        ("llama_540m", "8xA100"),
        ("llama_1b", "8xA100"),
        ("llama_2b", "8xA100"),
        ("llama_8b", "8xH100"),
        ("llama_8b_v5e_256", "v5e:16x16"),
        ("llama_8b_v5p_64", "v5p:4x4x4"),
        ("llama_8b_v6e_256", "v6e:16x16"),
        ("llama32_1b_v5e_16", "v5e:4x4"),
        ("llama_70b", "32x8xH100"),
        ("llama_70b_v5p_512", "v5p:8x8x8"),
        ("mixtral_8x7b", "8x8xH100"),
        ("mixtral_8x7b_v5p_64", "v5p:4x4x4"),
    ],
)
def test_fits_the_hardware_it_is_for(name, hardware):
    assert quick_plan(RECIPES[name](), target(hardware)).fits
