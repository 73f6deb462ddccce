"""`trellis prove`: a step that is right, one that is not, and targets that take no such step."""

import json

import pytest

from trellis.commands.line import main
from trellis.proof.interpreter import collectives


@pytest.mark.slow
def test_a_right_step_is_proven(capsys):
    assert main(["prove", "tiny", "--on", "v5e:2x2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["proven"] is True
    assert "layers.block.attention.q" in json.dumps(found)


@pytest.mark.slow
def test_a_sum_that_loses_a_device_is_not(capsys, monkeypatch):
    """In the place of hardware, or a compiler, that leaves the last device of each group out."""
    combined = collectives._combined
    monkeypatch.setattr(collectives, "_combined", lambda rows, combine: combined(rows[:-1], combine))
    assert main(["prove", "tiny", "--on", "v5e:2x2", "--no-reason"]) == 3
    assert "NOT PROVEN" in capsys.readouterr().out


def test_a_target_that_is_none_is_refused(capsys):
    assert main(["prove", "tiny", "--on", "v5e:3x5x7"]) == 2
    assert main(["prove", "tiny", "--on", "v5e:2x2", "--mesh.data", "3"]) == 2
    said = capsys.readouterr().err
    assert said.count("trellis: ") == 2 and said.count("fix: ") == 2
