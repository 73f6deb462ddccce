"""What tests of real runs share."""

import jax
import pytest

from tests.train.small import make_run


@pytest.fixture(scope="session")
def run_file(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("stores"))


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch):
    """The user's cache folder is one of the tests'."""
    assert len(jax.devices()) == 8  # a first command would settle how many there are for all tests
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
