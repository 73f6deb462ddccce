"""What tests of real runs share."""

import functools
import inspect

import jax
import pytest

from tests.train.small import make_run
from trellis.hardware import peak
from trellis.models import generate


@pytest.fixture(scope="session")
def run_file(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("stores"))


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch):
    """The user's cache folder is one of the tests', what this machine could do is measured in milliseconds, and no text
    is sampled at the end of a run: processes of their own do that. A run's program is compiled once for all runs that
    have it, wherever a test starts them."""
    assert len(jax.devices()) == 8  # a first command would settle how many there are for all tests
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(generate, "sample", lambda *_, **__: ["a sample"])
    monkeypatch.setattr(jax.stages.Lowered, "compile", inspect.unwrap(jax.stages.Lowered.compile))
    monkeypatch.setattr(peak, "_LONG", 0.0)
    monkeypatch.setattr(peak, "measure_matmul_peak", functools.partial(peak.measure_matmul_peak, size=64))
