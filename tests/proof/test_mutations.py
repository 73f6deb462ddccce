"""Mistakes in compiled programs are found: a fixed sample. `benchmarks/prove_mutations.py` measures more of them."""

import numpy as np
import pytest

from tests.proof.mutations import outcomes

RUN = {"mesh.data": "2", "mesh.model": "2", "layout.preset": "auto"}


@pytest.mark.slow
def test_mistakes_are_found():
    seen = list(outcomes("tiny", "v5e:2x2", RUN, np.random.default_rng(1), 24))
    for outcome in seen:
        if outcome.result != "found":  # then it is none: the results are the same ones but for the order of sums
            assert outcome.error <= 2 * outcome.right_error, outcome.kind
    found = [outcome.kind for outcome in seen if outcome.result == "found"]
    assert len(found) >= 18
    assert {"a sum left out", "a sum taken twice", "members of two groups swapped"} <= set(found)
