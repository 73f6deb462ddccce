import math

import jax
import jax.numpy as jnp
import pytest

from trellis import UserError
from trellis.optim import WSD, AdamW, Constant, Cosine, InverseSqrt, Linear, learning_rates, make_optimizer

STEPS, PEAK = 20, 0.5


def rates(schedule):
    f = jax.jit(learning_rates(schedule, PEAK, STEPS))
    return [float(f(jnp.int32(step))) for step in range(STEPS)]


@pytest.mark.parametrize(
    ("schedule", "formula"),
    [
        (Constant(warmup_steps=4), lambda t: PEAK),
        (Linear(warmup_steps=4, final_fraction=0.2), lambda t: PEAK * (1 - 0.8 * (t - 4) / 16)),
        (Cosine(warmup_steps=4), lambda t: PEAK * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (t - 4) / 16)))),
        (WSD(warmup_steps=4, decay_steps=5, final_fraction=0.2), lambda t: PEAK * (1 - 0.8 * max(t - 15, 0) / 5)),
        (InverseSqrt(warmup_steps=4), lambda t: PEAK * math.sqrt(4 / t)),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_closed_form(schedule, formula):
    """Step n, counted from 0, has the learning rate of time n + 1: no step has 0 for its warmup."""
    expected = [PEAK * t / 4 if t <= 4 else formula(t) for t in range(1, STEPS + 1)]
    assert rates(schedule) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("schedule", [Linear, lambda **more: WSD(decay_steps=3, **more)], ids=["linear", "wsd"])
def test_a_rate_that_ends_at_zero_is_never_below(schedule):
    for steps in (4, 30, 77):
        line = jax.jit(learning_rates(schedule(warmup_steps=1, final_fraction=0.0), 0.01, steps))
        found = [float(line(jnp.int32(step))) for step in range(steps)]
        assert found[-1] == 0 and min(found) == 0


def test_without_warmup_the_first_step_is_near_the_peak():
    assert rates(Constant(warmup_steps=0)) == [PEAK] * STEPS
    assert rates(Linear(warmup_steps=0))[0] == pytest.approx(PEAK * 19 / 20)


@pytest.mark.parametrize(
    "schedule",
    [
        Linear(warmup_steps=3, final_fraction=0.25),
        Cosine(warmup_steps=3, final_fraction=0.25),
        WSD(warmup_steps=3, decay_steps=7, final_fraction=0.25),
    ],
    ids=lambda s: s.kind,
)
def test_the_last_step_has_the_final_rate(schedule):
    assert rates(schedule)[-1] == pytest.approx(0.25 * PEAK)
    assert max(rates(schedule)) == pytest.approx(PEAK)


@pytest.mark.parametrize(
    "schedule", [WSD(warmup_steps=4, decay_steps=17), Linear(warmup_steps=21), Cosine(warmup_steps=21)]
)
def test_a_schedule_that_does_not_fit_is_refused_also_without_a_run(schedule):
    with pytest.raises(UserError, match="The schedule's warmup and decay must fit into the run"):
        learning_rates(schedule, PEAK, STEPS)
    with pytest.raises(UserError, match="must fit into the run"):
        make_optimizer(AdamW(learning_rate=PEAK), schedule, steps=STEPS)


def test_numbers_that_turn_gradients_around_are_refused_also_without_a_run():
    for wrong in (-1.0, 0.0, math.nan):
        with pytest.raises(UserError, match="`clip_norm` must be positive"):
            make_optimizer(AdamW(learning_rate=PEAK), Constant(warmup_steps=0), steps=STEPS, clip_norm=wrong)
        with pytest.raises(UserError, match="A learning rate must be positive"):
            learning_rates(Constant(warmup_steps=0), wrong, STEPS)
