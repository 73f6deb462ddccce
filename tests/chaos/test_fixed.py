"""A few faults of `make chaos`, the same ones each time."""

import collections
import json
import random
import signal
import time

import pytest

from tests.chaos.__main__ import table
from tests.chaos.bench import LIMIT, Bench, Case, End, Wrong
from tests.chaos.faults import FAULTS


def killed_at(case, line):
    """Kills a run once it has logged so many steps. Its disk is slow: most kills fall into a save."""
    started, deadline = case.start(slow=0.1), time.monotonic() + LIMIT
    while len(case.lines()) < line and started.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(case.random.uniform(0, 0.05))
    started.kill()
    assert started.end().code == -signal.SIGKILL, f"the kill after step {line} came after the end"


@pytest.mark.slow(first=True)
def test_killed_three_times_and_with_a_damaged_checkpoint_a_run_ends_with_the_same_numbers_to_the_bit(tmp_path):
    bench = Bench(tmp_path / "bench")
    try:
        case = Case(bench, random.Random(3), "case")
        for line in (9, 17, 25):  # one that is made after step 8 finds a whole checkpoint of step 4
            killed_at(case, line)
        said = "damaged checkpoint", FAULTS["damaged checkpoint"](case)
        events = [json.loads(line)["event"] for line in (case.run / "timeline.jsonl").read_text().splitlines()]
        case.finish()
    finally:
        bench.close()
    assert events.count("resumed") == 3
    assert "1  the one before it was used" in table(collections.Counter([said]))


def test_what_a_fault_may_not_do_is_found():
    expect = lambda code, err, told="": Case.expect(None, End(code, "", err), (0, 3), told)
    four = "trellis: A rule.\n  seen:  a\n  where: b\n  fix:   c\n"
    expect(0, "step 1"), expect(3, four, "A rule")
    for code, err in ((1, four), (3, "oh"), (3, four + four), (0, "Traceback (most recent call last)\n")):
        with pytest.raises(Wrong):
            expect(code, err)
    with pytest.raises(Wrong, match="not told"):
        expect(3, four, "another")
