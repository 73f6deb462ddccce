"""A grid of cases, of which `make check` runs a sample and `make test` all."""

from collections.abc import Iterable

import pytest


def diagonal(rows: Iterable[str], columns: Iterable[str]) -> list:
    """Every pair, as parameters of a test: all are marked slow but for as many as meet each row and each column.

    >>> [pair.values for pair in diagonal("ab", "xyz") if not pair.marks]
    [('a', 'x'), ('a', 'z'), ('b', 'y')]
    """
    rows, columns = list(rows), list(columns)
    few = min(len(rows), len(columns))
    return [
        pytest.param(row, column, marks=() if i % few == j % few else pytest.mark.slow)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]
