"""The table of recipes beside the search: a row is kept as soon as it is found, and is not planned twice."""

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def recipes(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("recipes_benchmark", FOLDER / "recipes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RECIPES", {"big": None, "small": None, "here": None})
    monkeypatch.setattr(module, "hardware_of", lambda name: None if name == "here" else "v5e:4x4")
    return module


def a_row(name: str, late: str = "+1.0%") -> tuple[str, ...]:
    return (name, "v5e-16", "0.500", "1,000", "40.0%", "4.0", "16.0", late, "--mesh.data 4 --remat.policy full")


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
