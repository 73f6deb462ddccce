"""The table of recipes beside the search: a row is kept as soon as it is found, and is not planned twice."""

import sys
from types import SimpleNamespace

import pytest

from tests.benchmarks.script import load
from trellis.recipes import load_run


@pytest.fixture
def recipes(monkeypatch):
    module = load("recipes")
    monkeypatch.setattr(module, "RECIPES", {"big": None, "small": None, "here": None})
    monkeypatch.setattr(module, "hardware_of", lambda name: None if name == "here" else "v5e:4x4")
    monkeypatch.setattr(module, "is_todays", lambda line: line[2] == "1234abcd")
    return module


def a_row(name: str, late: str = "+1.0%", settings: str = "1234abcd") -> tuple[str, ...]:
    return (
        name,
        "v5e-16",
        settings,
        "0.500",
        "1,000",
        "40.0%",
        "4.0",
        "16.0",
        late,
        "--mesh.data 4 --remat.policy full",
    )


@pytest.mark.slow
def test_a_table_that_was_cut_short_goes_on(recipes, monkeypatch, tmp_path):
    planned, out = [], tmp_path / "recipes.txt"

    def row(name):
        planned.append(name)
        if planned == ["big", "small"]:
            raise KeyboardInterrupt
        return a_row(name)

    monkeypatch.setattr(recipes, "row", row)
    monkeypatch.setattr(sys, "argv", ["recipes.py", "--out", str(out)])
    with pytest.raises(KeyboardInterrupt):
        recipes.main()
    assert recipes.kept(out) == {"big": a_row("big")}
    assert recipes.main() == 0 and planned == ["big", "small", "small"]
    assert recipes.kept(out) == {name: a_row(name) for name in ("big", "small")}
    assert recipes.main() == 0 and len(planned) == 3, "nothing is planned twice"


@pytest.mark.parametrize("late", ["+3.1%", "no room"])
def test_a_recipe_that_is_behind_fails_also_when_its_row_is_kept(recipes, monkeypatch, tmp_path, late):
    out = tmp_path / "recipes.txt"
    recipes.keep(out, {"small": a_row("small", late), "big": a_row("big", "-2.0%")})
    assert out.read_text().splitlines()[1].startswith("big"), "in the order of the recipes"
    monkeypatch.setattr(sys, "argv", ["recipes.py", "--out", str(out)])
    assert recipes.main() == 1


def test_a_recipe_that_is_named_is_planned_anew(recipes, monkeypatch, tmp_path):
    out = tmp_path / "recipes.txt"
    recipes.keep(out, {"small": a_row("small", "+9.0%"), "big": a_row("big")})
    monkeypatch.setattr(recipes, "row", a_row)
    monkeypatch.setattr(sys, "argv", ["recipes.py", "small", "--out", str(out)])
    assert recipes.main() == 0 and recipes.kept(out)["small"] == a_row("small")


def test_a_row_that_is_not_of_today_is_made_anew(recipes, monkeypatch, tmp_path):
    out = tmp_path / "recipes.txt"
    recipes.keep(out, {"small": a_row("small", settings="before"), "big": a_row("big", "+2.0%")})
    monkeypatch.setattr(recipes, "row", a_row)
    monkeypatch.setattr(sys, "argv", ["recipes.py", "--out", str(out)])
    assert recipes.main() == 0
    assert recipes.kept(out) == {"big": a_row("big", "+2.0%"), "small": a_row("small")}


def test_a_row_is_a_plans_within_a_hundredth(recipes):
    plan = lambda seconds, gib: SimpleNamespace(seconds=seconds, memory=SimpleNamespace(peak=gib * 2**30))
    line = a_row("big")  # 0.5 s, 4 GiB
    assert recipes.is_plan(line, plan(0.504, 4.03))
    assert not recipes.is_plan(line, plan(0.51, 4.0)) and not recipes.is_plan(line, plan(0.5, 4.2))


def test_settings_are_what_a_plan_is_made_from(recipes):
    run = load_run("llama_84m")
    others = {
        "mesh.data": "4",
        "remat.policy": "full",
        "batch_size": "8",
        "model.layers": "3",
        "precision.compute": "float32",
    }
    for field, value in others.items():
        assert recipes.settings_of(load_run("llama_84m", {field: value})) != recipes.settings_of(run), field
    assert recipes.settings_of(load_run("llama_84m", {"steps": "20000", "name": "mine"})) == recipes.settings_of(run)


@pytest.mark.parametrize(
    ("step", "winner", "settings", "behind"),
    [
        ("1.300", "1.400", "1234abcd", False),
        ("1.300", "does not fit", "1234abcd", False),
        ("1.300", "no room", "1234abcd", False),
        ("1.300", "1.300", "1234abcd", True),
        ("does not fit", "1.400", "1234abcd", True),
        ("1.300", "1.400", "before", True),
    ],
)
def test_a_recipe_is_not_behind_what_takes_longer_by_its_compiled_schedule(
    recipes, tmp_path, step, winner, settings, behind
):
    row, out = a_row("small", "+5.0%"), tmp_path / "contested.txt"
    assert recipes.is_behind(row, out) and not recipes.is_behind(a_row("small"), out)
    recipes.keep(out, {"small": ("small", row[1], settings, step, winner, row[-1])}, recipes.BY_SCHEDULES)
    assert recipes.is_behind(row, out) == behind
    assert recipes.is_behind((*row[:-1], "--mesh.data 8"), out), "another winner was not asked about"
    assert recipes.is_behind(a_row("small", "no room"), out)
