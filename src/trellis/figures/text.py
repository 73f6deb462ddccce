"""Text in columns."""

from collections.abc import Iterable


def aligned(header: Iterable[str], lines: Iterable[Iterable[str]], right: Iterable[int] = ()) -> str:
    """Text columns, two spaces apart; the columns in `right` are aligned to the right."""
    table = [list(header), *(list(line) for line in lines)]
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    right = set(right)
    return "\n".join(
        "  ".join(
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths))
        ).rstrip()
        for line in table
    )
