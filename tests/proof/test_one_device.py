"""The numbers that proofs are made with."""

import dataclasses

import numpy as np
import pytest

from trellis.proof import one_device


@dataclasses.dataclass(frozen=True)
class State:
    model: np.ndarray
    optimizer: np.ndarray


@pytest.mark.parametrize(("gap", "between"), [(1e-6, True), (1e-3, False)])
def test_a_token_between_two_experts_is_noticed(monkeypatch, gap, between):
    """Its gradient goes to the likelier one, as that of a router's scores does."""
    scores = np.float32([[1, 1 - gap, 0], [0, 1 - gap, 1], [1 - gap, 0, 1], [1, 0, 1 - gap]])
    scores = np.tile(scores, (8, 1))
    step = lambda made, state, batch: (State(state.model, np.eye(3, dtype=np.float32)[state.model.argmax(1)]), {})
    monkeypatch.setattr(one_device, "_step", step)
    state = State(scores, scores)
    assert one_device._between_experts(None, state, None, step(None, state, None)) == between
