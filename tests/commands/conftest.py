"""Commands are tried on the runs that training is tried on."""

from tests.train.conftest import own_cache, run_file

__all__ = ["own_cache", "run_file"]
