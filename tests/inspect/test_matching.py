"""Of arrays that could be those of several rows, each row gets what leaves none over."""

import dataclasses

from tests.inspect.test_structure import PROGRAM, ROWS, found


def sums(*shapes):
    """The program with more sums, each a shape and its groups."""
    lines = "".join(
        f"  %part.{n} = f32[{shape}] parameter({n + 1})\n"
        f"  %more.{n} = f32[{shape}] all-reduce(%part.{n}), replica_groups={groups}, to_apply=%sum\n"
        for n, (shape, groups) in enumerate(shapes)
    )
    return PROGRAM.replace("  %all-reduce.1", f"{lines}  %all-reduce.1")


def test_a_sum_that_is_done_along_one_axis_after_the_other_is_not_that_of_another_row():
    """Eight numbers, summed twice, are as many as the sixteen of the other sum: not those, stacked after a loop."""
    everywhere, over_model, over_data = "{{0,1,2,3}}", "{{0,1},{2,3}}", "{{0,2},{1,3}}"
    of_eight = [("8", over_model), ("8", over_data)] * 2
    turns = dataclasses.replace(ROWS[0], axes=("data", "model"), payload=32, times=2)
    scattered = dataclasses.replace(ROWS[0], kind="reduce-scatter", axes=("data", "model"), payload=64)
    assert found(sums(("16", everywhere), *of_eight), (*ROWS, turns, scattered)).right
    assert found(sums(("16", everywhere)), (*ROWS, turns)).right  # stacked, and done after a loop
    assert not found(sums(("16", everywhere)), (*ROWS, turns, scattered)).right
