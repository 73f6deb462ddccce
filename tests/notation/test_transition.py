"""What a transition does, step by step."""

import pytest

from trellis.notation import kind_of, parse_transition, plan


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("a/x -> a", [("all-gather", ("x",), "a")]),
        ("a/x -> a ~x", [("all-gather", ("x",), "a")]),
        ("a +x -> a", [("all-reduce", ("x",), None)]),
        ("a +x -> a/x", [("reduce-scatter", ("x",), "a")]),
        ("a/x b -> a b/x", [("all-to-all", ("x",), "a")]),
        ("a -> a/x", [("slice", ("x",), "a")]),
        ("a -> a ~x", [("cast", ("x",), None)]),
        ("a ~x -> a/x", [("slice", ("x",), "a")]),
        ("a -> a", []),
        ("a/x +y -> a/x +y", []),
        ("a/x/y -> a ~x ~y", [("all-gather", ("x", "y"), "a")]),
        ("a/x/y -> a ~y", [("all-gather", ("y",), "a"), ("all-gather", ("x",), "a")]),
        ("a +x +y -> a/y/x", [("reduce-scatter", ("y", "x"), "a")]),
        ("a b +x +y -> a/x b", [("reduce-scatter", ("x",), "a"), ("all-reduce", ("y",), None)]),
        ("a/x b/y -> a b/y/x", [("all-to-all", ("x",), "a")]),
        ("a/x/y b -> a b/x/y", [("all-to-all", ("x", "y"), "a")]),
        ("a/x/y -> a/y/x", [("permute", ("y", "x"), "a")]),
        # The axis that stays must be the major one, or the gathered slices would not be next to each other.
        ("a/x/y -> a/y", [("permute", ("y", "x"), "a"), ("all-gather", ("x",), "a")]),
        # Scatters and slices come first, so that gathers move less.
        ("a/x b +y -> a b/y", [("reduce-scatter", ("y",), "b"), ("all-gather", ("x",), "a")]),
        ("a/x b -> a b/y", [("slice", ("y",), "b"), ("all-gather", ("x",), "a")]),
        # What only gradients do.
        ("a/x -> a +x", [("cast", ("x",), None)]),
        ("a ~x -> a", [("cast", ("x",), None)]),
    ],
)
def test_the_kinds_of_a_transition(text, kinds):
    assert kind_of(*parse_transition(text)) == kinds


def test_two_dimensions_may_exchange_their_axes():
    before, after = parse_transition("a/x b/y -> a/y b/x")
    steps = plan(before, after)
    assert [str(step.after) for step in steps] == ["a b/y/x", "a b/x/y", "a/y b/x"]
    assert [step.kind for step in steps] == ["all-to-all", "permute", "all-to-all"]


def test_slices_that_wait_for_an_axis_that_stays():
    before, after = parse_transition("a/x/z b/y -> a b/x/z +y")
    held = before
    for step in plan(before, after):
        assert step.before == held
        held = step.after
    assert held == after
