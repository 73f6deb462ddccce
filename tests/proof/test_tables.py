"""Every recipe is proven on the hardware that it is written for, and every layout everywhere: the tables say so.

Proving them all takes hours (`benchmarks/prove_recipes.py`); a recipe, a target or a layout that is new has no row yet.
"""

import dataclasses
import importlib
import sys
from pathlib import Path

import pytest

from tests.proof.cases import layouts, recipes
from trellis.commands.line import main

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STARTER = next(case for case in recipes() if case.name == "starter")


def rows(name: str) -> dict[tuple[str, ...], str]:
    """Lines of a table by its first three columns: name, family, target."""
    lines = (BENCHMARKS / "results" / name).read_text().splitlines()[1:]
    return {(line[:26].strip(), line[27:37].strip(), line[38:48].strip()): line[80:] for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize(("table", "cases"), [("prove_recipes.txt", recipes), ("prove_layouts.txt", layouts)])
def test_every_row_is_there_and_proven(table, cases):
    found = rows(table)
    for case in cases():
        verdict, number, matched = found[case.name, case.family, case.on].split()[:3]
        there, asked = matched.split("/")
        assert (verdict, there) == ("proven", asked) and float(number) < 2e-4, case


@pytest.mark.slow
def test_no_mistake_was_missed_in_any_program(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # which the script sets, too
    script = importlib.import_module("prove_mutations")

    lines = (BENCHMARKS / "results" / "prove_mutations.txt").read_text().partition("\nmistake")[0].splitlines()
    for case in [*recipes(), *script.BESIDES]:
        (line,) = (line for line in lines if line.startswith(f"{script.program(case)}: "))
        assert ", 0 missed," in line


@pytest.mark.slow
def test_a_recipe_is_proven(tmp_path):
    case = dataclasses.replace(STARTER, on="v5e:2x2", options=(*STARTER.options, "--batch_size=4"))
    assert main([*case.arguments(tmp_path), "--no-reason"]) == 0
