"""Numbers as people read them."""

import math


def count(value: float) -> str:
    """A count with three digits and a suffix.

    >>> count(950), count(12345), count(1.5e9)
    ('950', '12.3k', '1.50G')
    """
    return _scaled(value, 1000.0, ("", "k", "M", "G", "T", "P"))


def size(num_bytes: float) -> str:
    """Bytes in binary units.

    >>> size(512), size(3 << 30)
    ('512 B', '3.00 GiB')
    """
    return _scaled(num_bytes, 1024.0, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def duration(seconds: float) -> str:
    """Seconds as the two largest units.

    >>> duration(0.25), duration(42), duration(130), duration(7380), duration(200000)
    ('0.25 s', '42 s', '2 min 10 s', '2 h 03 min', '2 d 7 h')
    """
    if not math.isfinite(seconds):
        return "?"
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _scaled(value: float, base: float, suffixes: tuple[str, ...]) -> str:
    if not math.isfinite(value):
        return "?"
    power = 0
    # 999.5 would round to 1000 of its unit: it belongs to the next.
    while abs(value) >= base - base / 2000 and power < len(suffixes) - 1:
        value, power = value / base, power + 1
    digits = 0 if power == 0 else max(0, 2 - (len(str(int(abs(value)))) - 1))
    return f"{value:.{digits}f}{suffixes[power]}"
