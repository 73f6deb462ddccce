"""A few faults of `make chaos`, the same ones each time."""

import collections
import random

import pytest

from tests.chaos.__main__ import table
from tests.chaos.bench import Bench, Case, End, Wrong
from tests.chaos.faults import FAULTS


@pytest.mark.slow
def test_some_faults_lose_nothing(tmp_path):
    bench = Bench(tmp_path / "bench")
    try:
        case = Case(bench, random.Random(3), "case")
        said = [(name, FAULTS[name](case)) for name in ("killed", "damaged checkpoint")]
        case.finish()
    finally:
        bench.close()
    assert said == [("killed", "killed"), ("damaged checkpoint", "the one before it was used")]
    assert "1  the one before it was used" in table(collections.Counter(said))


def test_what_a_fault_may_not_do_is_found():
    expect = lambda code, err, told="": Case.expect(None, End(code, "", err), (0, 3), told)
    four = "trellis: A rule.\n  seen:  a\n  where: b\n  fix:   c\n"
    expect(0, "step 1"), expect(3, four, "A rule")
    for code, err in ((1, four), (3, "oh"), (3, four + four), (0, "Traceback (most recent call last)\n")):
        with pytest.raises(Wrong):
            expect(code, err)
    with pytest.raises(Wrong, match="not told"):
        expect(3, four, "another")
