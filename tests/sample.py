"""A grid of cases, of which `make check` runs a sample and `make test` all."""

import itertools
from collections.abc import Collection, Iterable

import pytest


def grid(rows: Iterable[str], columns: Iterable[str], quick: Collection[tuple[str, str]]) -> list:
    """Every pair, as parameters of a test: all are marked slow but for some.

    >>> [pair.values for pair in grid("ab", "xyz", quick=[("a", "y")]) if not pair.marks]
    [('a', 'y')]
    """
    pairs = [*itertools.product(rows, columns)]
    assert {*quick} <= {*pairs}, "a pair that is to be quick is one of the grid's"
    return [pytest.param(*pair, marks=() if pair in quick else pytest.mark.slow) for pair in pairs]
