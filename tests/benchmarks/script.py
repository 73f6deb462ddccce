"""Benchmarks as modules, for tests of what they compute and of the tables that they keep."""

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load(name: str):
    """A new module of `benchmarks/NAME.py`, which finds the files beside it."""
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        spec.loader.exec_module(module)
    return module
