"""A random training, and what tells two apart; `make fuzz_trainings` draws as many as one likes."""

import pytest

from tests.fuzz.trainings import compared, draw, judge
from tests.train.small import make_run

LINES = [{"step": 1, "tokens": 9, "loss": 3.0, "grad_norm": 2.0}, {"step": 2, "tokens": 18, "loss": 2.0}]


def test_a_seed_is_one_training():
    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"loss": 2.00001}, None),
        ({"loss": 2.01}, "loss of step 2 is 2.01, of one device 2.0"),
        ({"loss": float("nan")}, "loss of step 2 is nan, of one device 2.0"),
        ({"tokens": 19}, "tokens of step 2 is 19, of one device 18"),
        ({"validation_loss": 2.0}, "validation_loss of step 2 is 2.0, of one device None"),
        ({"step": 3}, "2 lines of metrics, and 2 of other steps"),
    ],
)
def test_what_a_line_of_metrics_may_differ_by(change, said):
    found = compared(LINES, [LINES[0], LINES[1] | change], 1e-4, 3e-3)
    assert (found.what, found.why) == ("wrong", said) if said else found.what == "right"


@pytest.mark.slow
def test_a_random_training_that_was_stopped_is_as_on_one_device(tmp_path):
    make_run(tmp_path)
    found = judge(1, tmp_path)
    assert found.what == "right", f"{found.why}: {draw(1)}"
    assert judge(0, tmp_path).what == "refused"
