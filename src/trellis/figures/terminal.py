"""Curves in a line of text."""

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], width: int = 24) -> str:
    """A curve as a row of bars, from its least to its greatest value; means of neighbours if there are more values.

    >>> sparkline([8.0, 4.0, 2.0, 1.0]), sparkline([3.0, None, 3.0]), sparkline([])
    ('█▄▂▁', '▁▁', '')

    Args:
        values: numbers in order; None and numbers that are not finite are left out.
        width: the most characters.
    """
    known = [v for v in values if v is not None and math.isfinite(v)]
    if len(known) > width:
        cuts = [round(i * len(known) / width) for i in range(width + 1)]
        known = [sum(known[a:b]) / (b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] for v in known)
