"""A grid of cases, of which `make check` runs a sample and `make test` all."""

from collections.abc import Iterable

import pytest


def diagonal(rows: Iterable[str], columns: Iterable[str]) -> list:
    """Every pair, as parameters of a test: all are marked slow but for the first of both, the second of both, ...

    >>> [pair.values for pair in diagonal("ab", "xyz") if not pair.marks]
    [('a', 'x'), ('b', 'y')]
    """
    return [
        pytest.param(row, column, marks=() if i == j else pytest.mark.slow)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]
