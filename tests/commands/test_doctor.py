"""`trellis doctor`: what it says of a machine, of an installed Trellis and of one that runs from its source."""

import argparse
import importlib.metadata
import re

import jax
import pytest

from trellis.commands import doctor
from trellis.errors import UserError
from trellis.hardware import measure, peak
from trellis.hardware.measure import Machine


@pytest.fixture
def told(monkeypatch, capsys):
    """Runs the command, with made-up rates in place of measured ones."""
    monkeypatch.setattr(measure, "measure_machine", lambda: Machine(*[2e9] * 7))
    monkeypatch.setattr(peak, "matmul_peak", lambda devices, dtype: 1.5e12)

    def run() -> str:
        assert doctor.execute(argparse.Namespace(devices=None)) == 0
        return capsys.readouterr().out

    return run


def test_what_is_here_and_what_is_missing(told, monkeypatch):
    said = told()
    assert re.search(r"^devices +\d+ x \S+ \(cpu\)$", said, re.M)
    assert re.search(r"^jax +\d+\.\d+", said, re.M) and re.search(r"^float32 +1\.50 TFLOP/s", said, re.M)
    monkeypatch.setattr(peak, "matmul_peak", lambda devices, dtype: 1.5e9)
    assert re.search(r"^float32 +1\.50 GFLOP/s", told(), re.M)
    assert re.search(r"^  wandb +missing wandb: .* -m pip install 'trellis\[wandb\]'$", said, re.M)


def test_of_a_trellis_that_is_not_installed(told, monkeypatch):
    """As on a machine to which only its source was brought."""

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    said = told()
    assert re.search(r"^trellis +not installed, only found at (.+): .* -m pip install \1$", said, re.M)
    assert "extras" not in said and "TFLOP/s" in said


def test_a_platform_that_is_not_there(told, monkeypatch):
    """As a run says it, whose message names this command."""

    def none():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", none)
    with pytest.raises(UserError, match="JAX must have devices of the platform that it is to use"):
        told()
