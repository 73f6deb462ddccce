"""Figures as text, each with what was planned behind it where that is known."""


def milliseconds(seconds: float, planned: float | None = None) -> str:
    """
    >>> milliseconds(0.812, 0.79), milliseconds(0.812)
    ('812.0 ms (plan 790.0)', '812.0 ms')
    """
    return f"{seconds * 1e3:,.1f} ms" + (f" (plan {planned * 1e3:,.1f})" if planned else "")


def gibibytes(num_bytes: float, planned: float | None = None) -> str:
    """
    >>> gibibytes(3 * 2**30, 2**31)
    '3.00 GiB (plan 2.00)'
    """
    return f"{num_bytes / 2**30:,.2f} GiB" + (f" (plan {planned / 2**30:,.2f})" if planned else "")


def percent(share: float | None) -> str:
    """
    >>> percent(0.5129), percent(None)
    ('51.3%', '')
    """
    return f"{share:.1%}" if share else ""
