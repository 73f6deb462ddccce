"""A few random runs; `make fuzz_runs` draws as many as one likes."""

import pytest

from tests.fuzz.runs import draw, judge


def test_a_seed_is_one_run():
    assert draw(1) == draw(1) != draw(5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [12, 14])
def test_a_random_run_is_as_on_one_device(seed):
    found = judge(seed)
    assert found.what == "right", f"{found.why}: {draw(seed)}"
    assert judge(3).what == "refused"
