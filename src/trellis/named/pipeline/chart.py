"""The schedule of a pipeline as a chart, from the functions that the step itself uses."""

from trellis.named.pipeline.schedule import Schedule, Unit


def chart(schedule: Schedule) -> str:
    """Which microbatch each stage has in each tick, in its forward half (F) and in its backward half (B).

    With several groups of layers, a letter says in which one: `2b` is microbatch 2 in the second.

    >>> print(chart(Schedule(2, 1, 3)))
    tick        0 1 2 3 4
    stage 0  F  0 1 2 . .
             B  . . 0 1 2
    stage 1  F  . 0 1 2 .
             B  . 0 1 2 .
    """
    width = len(str(schedule.microbatches - 1)) + (schedule.groups > 1)
    width = max(width, len(str(schedule.ends - 1)))

    def cell(unit: Unit) -> str:
        group = chr(ord("a") + unit.group) if schedule.groups > 1 else ""
        return f"{unit.microbatch}{group}" if unit.works else "."

    def row(head: str, cells) -> str:
        return f"{head:<12}" + " ".join(f"{text:>{width}}" for text in cells)

    rows = [row("tick", map(str, range(schedule.ends)))]
    for stage in range(schedule.stages):
        for letter, half in (("F", schedule.forward), ("B", schedule.backward)):
            head = f"stage {stage}" if letter == "F" else ""
            rows.append(row(f"{head:<9}{letter}", (cell(half(tick, stage)) for tick in range(schedule.ends))))
    return "\n".join(rows)
