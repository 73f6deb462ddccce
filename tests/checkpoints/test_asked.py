"""What `Checkpoints` are asked for: numbers that they cannot go by are refused when they are made."""

import math

import pytest

from trellis.checkpoints.checkpoints import Checkpoints
from trellis.errors import UserError


@pytest.mark.parametrize("count", [0, 2.5, "2", None])
def test_a_run_keeps_its_newest_checkpoint(tmp_path, count):
    with pytest.raises(UserError, match=f"must keep a whole number of its newest(.|\n)*keep_latest={count!r}"):
        Checkpoints(tmp_path, keep_latest=count)
    with pytest.raises(UserError, match="Checkpoints of multiples of a step are kept from step 1 on"):
        Checkpoints(tmp_path, keep_every=count or 0)


@pytest.mark.parametrize("folder", [5, None, b"checkpoints", ""])
def test_checkpoints_have_a_folder(tmp_path, monkeypatch, folder):
    """An empty name was the current folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"need the path of a folder(.|\n)*seen:  folder={folder!r}\n"):
        Checkpoints(folder)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("value", [0, -1, math.nan, "5", True])
def test_a_wait_and_the_hosts_memory_are_numbers_above_zero(tmp_path, value):
    """A wait of `nan` seconds never ended, and one of "5" ended in a TypeError in the background of the first save."""
    for name, rule in (("timeout", "must wait a number of seconds above 0"), ("host_bytes", "whole number of bytes")):
        with pytest.raises(UserError, match=f"{rule}(.|\n)*seen:  {name}={value!r}\n"):
            Checkpoints(tmp_path / "checkpoints", **{name: value})
    assert not any(tmp_path.iterdir())
