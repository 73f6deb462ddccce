"""Tables of text, for what benchmarks print and keep."""

from collections.abc import Collection, Sequence


def aligned(header: Sequence[str], lines: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Columns two spaces apart; those in `right` are aligned to the right."""
    rows = [header, *lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = lambda row: [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))]
    return "\n".join("  ".join(cells(row)).rstrip() for row in rows)
