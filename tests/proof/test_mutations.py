"""Mistakes in compiled programs are found: a fixed sample. `benchmarks/prove_mutations.py` measures more of them."""

import re

import numpy as np
import pytest

from tests.proof.mutations import outcomes

RUN = {"mesh.data": "2", "mesh.model": "2", "layout.preset": "auto"}


@pytest.mark.slow
def test_mistakes_are_found():
    seen = list(outcomes("tiny", "v5e:2x2", RUN, np.random.default_rng(1), 24))
    assert not [outcome for outcome in seen if outcome.result == "missed"]
    found = [outcome.kind for outcome in seen if outcome.result == "found"]
    assert len(found) >= 18
    assert {"a sum left out", "a sum taken twice", "members of two groups swapped"} <= set(found)
    hidden = [o.line for o in seen if o.result == "found" and o.collective and not o.structure]
    numbers = [not re.search(r"\[\d", line.partition(" all-reduce")[0]) for line in hidden]
    assert all(numbers), hidden  # of single numbers one may stand for another
