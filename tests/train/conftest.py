"""What tests of real runs share."""

import functools
import importlib
import inspect
import signal

import jax
import pytest

from tests.train.small import make_run
from trellis.hardware import peak
from trellis.models import generate

assembling = importlib.import_module("trellis.train.assemble")


class AssembledOnce:
    """`assemble`, which gives what it gave where a run that says the same comes again on the same devices."""

    def __init__(self, assemble=assembling.assemble):
        self._assemble, self._found = assemble, {}

    def __call__(self, run, devices, **options):
        if options:
            return self._assemble(run, devices, **options)
        key = repr(run), tuple(devices)
        if key not in self._found:
            while len(self._found) >= 8:
                del self._found[next(iter(self._found))]
            self._found[key] = self._assemble(run, devices)
        return self._found[key]


assembled_once = AssembledOnce()


@pytest.fixture(scope="session")
def run_file(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("stores"))


@pytest.fixture
def hangup():
    """A SIGHUP that is not ignored, as it is under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch):
    """The user's cache folder is one of the tests', what this machine could do is measured in milliseconds, and no text
    is sampled at the end of a run: processes of their own do that. A run's program is compiled once for all runs that
    have it, wherever a test starts them, and traced once for those of one process."""
    assert len(jax.devices()) == 8  # a first command would settle how many there are for all tests
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(generate, "sample", lambda *_, **__: ["a sample"])
    monkeypatch.setattr(jax.stages.Lowered, "compile", inspect.unwrap(jax.stages.Lowered.compile))
    monkeypatch.setattr(peak, "_LONG", 0.0)
    monkeypatch.setattr(peak, "measure_matmul_peak", functools.partial(peak.measure_matmul_peak, size=64))
    monkeypatch.setattr(assembling, "assemble", assembled_once)
