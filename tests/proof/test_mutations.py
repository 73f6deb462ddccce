"""Mistakes in compiled programs are found: a fixed sample. `benchmarks/prove_mutations.py` measures more of them."""

import numpy as np
import pytest

from tests.proof.cases import Case
from tests.proof.mutations import outcomes

CASE = Case("tiny", "", "v5e:2x2", ("--mesh.data=2", "--mesh.model=2", "--layout.preset=auto", "--batch_size=4"))


@pytest.mark.slow
def test_mistakes_are_found():
    seen = list(outcomes(CASE, np.random.default_rng(1), 24))
    assert not [outcome for outcome in seen if outcome.result == "missed"]
    found = [outcome.kind for outcome in seen if outcome.result == "found"]
    assert len(found) >= 18
    assert {"a sum left out", "a sum taken twice", "a maximum for a sum", "members of two groups swapped"} <= set(found)
    assert not [o.line for o in seen if o.result == "found" and o.collective and not o.structure]
