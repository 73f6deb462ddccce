"""One forward, one backward: who does what when, and where a stage keeps it."""

from pathlib import Path

import pytest

from trellis.named.pipeline.chart import chart
from trellis.named.pipeline.schedule import Schedule

SCHEDULES = [Schedule(1, 1, 3), Schedule(2, 1, 4), Schedule(4, 1, 16), Schedule(4, 1, 3), Schedule(4, 2, 8)]


def done(schedule: Schedule, half: str) -> dict[tuple[int, int, int], int]:
    """The tick of each (stage, group, microbatch)."""
    ticks = {}
    for tick in range(schedule.ends):
        for stage in range(schedule.stages):
            unit = getattr(schedule, half)(tick, stage)
            if unit.works:
                key = (stage, unit.group, unit.microbatch)
                assert key not in ticks
                ticks[key] = tick
    return ticks


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_part_does_every_microbatch_once_after_the_part_before(schedule):
    forward, backward = done(schedule, "forward"), done(schedule, "backward")
    assert forward.keys() == backward.keys()
    assert len(forward) == schedule.parts * schedule.microbatches
    for stage, group, microbatch in forward:
        part = group * schedule.stages + stage
        if part + 1 < schedule.parts:  # what is sent in a tick is there in the next
            after = ((part + 1) % schedule.stages, (part + 1) // schedule.stages, microbatch)
            assert forward[after] == forward[stage, group, microbatch] + 1
            assert backward[stage, group, microbatch] == backward[after] + 1
        else:  # the gradient of what leaves is made in the same tick
            assert forward[stage, group, microbatch] == backward[stage, group, microbatch]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_what_is_kept_lies_alone_until_it_is_used(schedule):
    places = schedule.places()
    for stage in range(schedule.stages):
        lies: dict[int, int] = {}
        for tick in range(schedule.ends):
            made, used = schedule.forward(tick, stage), schedule.backward(tick, stage)
            if made.works:
                place = int(places[stage, made.number])
                assert place not in lies and place < schedule.slots
                lies[place] = made.number
            if used.works:
                assert lies.pop(int(places[stage, used.number])) == used.number
        assert not lies


def test_slots_are_bounded_by_stages_and_the_bubble_shrinks_with_microbatches():
    assert [Schedule(4, 1, count).slots for count in (8, 16, 64)] == [7, 7, 7]
    assert [round(Schedule(4, 1, count).bubble, 3) for count in (4, 16, 64)] == [0.429, 0.158, 0.045]


@pytest.mark.parametrize("schedule", [Schedule(4, 1, 8), Schedule(2, 2, 4)], ids=str)
def test_the_charts_of_the_page_are_the_programs(schedule):
    assert chart(schedule) in (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()
