"""A step's operations are sorted by what their names say, and a time that was held up counts little."""

import pytest

from tests.benchmarks.script import load


@pytest.fixture(scope="module")
def script():
    return load("step_profile")


def test_operations_are_sorted_by_their_names(script):
    names = {
        "ynn_fusion.12": "products",
        "dot.3": "products",
        "subtract_exponential_fusion.4": "exponentials",
        "transpose_copy_fusion": "copies",
        "add_add_fusion.1": "arithmetic",
        "sort.1": "others",
        "while.35": None,
        "jit__turned_.4": None,
    }
    assert {name: script.kind_of(name) for name in names} == names


def test_the_fastest_quarter_of_an_operations_times_counts(script):
    """Four steps, in each of which a product runs twice: 2 ms a time, but for those that something else held up."""
    event = lambda name, us: {"ph": "X", "dur": us, "args": {"hlo_op": name}}
    events = [event("dot.1", us) for us in (2000, 2000, 9000, 9000, 5000, 4000, 9000, 3000)]
    events += [event("while.1", 1e6), {"ph": "M"}, {"ph": "X", "dur": 1e6, "args": {}}]
    assert script.milliseconds(events, steps=4) == {"products": 4.0}


def test_cycles_are_told_where_they_are_counted(script):
    found = {"flops": 3e9, "cycles": 100_000_000, "flops_a_cycle": 60.0}
    assert script.in_cycles(found) == "100M, 50.0% at 60.0 a cycle"
    assert script.counted(None, None, 3) is None and script.in_cycles({"cycles": None}) == ""
