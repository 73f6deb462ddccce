"""Mistakes in compiled programs are found: a fixed sample. `benchmarks/prove_mutations.py` measures more of them."""

import numpy as np
import pytest

from tests.proof.mutations import mutations
from trellis.hardware.chips import target
from trellis.proof.interpreter import Failed
from trellis.proof.one_device import on_one_device
from trellis.proof.runs import small_trial
from trellis.recipes import load_run

RUN = {"mesh.data": "2", "mesh.model": "2", "layout.preset": "auto"}


@pytest.mark.slow
def test_mistakes_are_found():
    trial = small_trial(load_run("tiny", RUN), target("v5e:2x2"), tuple(RUN))
    subject = trial.subject(on_one_device(trial.prepared.run, padding=trial.padding))
    compiled = subject.compile()
    right = subject.execute(compiled)
    assert right.proven
    kinds, found = set(), 0
    for kind, text in mutations(compiled.text, np.random.default_rng(1), 24):
        try:
            proof = subject.execute(compiled, text=text)
        except Failed:
            continue
        if proof.proven:  # then it is none: the results are the same ones but for the order of sums
            assert proof.error <= 2 * right.error, kind
        else:
            kinds.add(kind)
            found += 1
    assert found >= 18
    assert {"a sum left out", "a sum taken twice", "members of two groups swapped"} <= kinds
