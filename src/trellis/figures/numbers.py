"""Numbers as people read them."""

import math


def count(value: float) -> str:
    """A count with three digits and a suffix, B for billions.

    >>> count(950), count(12345), count(1.5e9), count(99_970)
    ('950', '12.3k', '1.50B', '100k')
    """
    return _scaled(value, 1000.0, ("", "k", "M", "B", "T"))


def size(num_bytes: float) -> str:
    """Bytes in binary units.

    >>> size(512), size(3 << 30)
    ('512 B', '3.00 GiB')
    """
    return _scaled(num_bytes, 1024.0, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def flop_rate(per_second: float) -> str:
    """A rate of arithmetic.

    >>> flop_rate(4.85e11), flop_rate(989e12)
    ('485 GFLOP/s', '989 TFLOP/s')
    """
    return _scaled(per_second, 1000.0, (" ", " k", " M", " G", " T", " P")) + "FLOP/s"


def dollars(value: float) -> str:
    """A price, with cents if they matter, and as three digits if it is less than ten cents.

    >>> dollars(1.164), dollars(99.5), dollars(1234.5), dollars(0.001), dollars(0.01234)
    ('$1.16', '$99.50', '$1,234', '$0.001', '$0.0123')
    """
    if 0 < value < 0.1:
        digits = f"{value:.{2 - math.floor(math.log10(value))}f}"
        return f"${digits.rstrip('0'):0<4}"
    return f"${value:,.0f}" if value >= 99.995 else f"${value:.2f}"


def seconds(value: float) -> str:
    """A time that was measured or predicted, with three digits.

    >>> seconds(29.4), seconds(1.5), seconds(0.0123), seconds(2e-5), seconds(0.0)
    ('29.4 s', '1.50 s', '12.3 ms', '20.0 us', '0 s')
    >>> seconds(9.999), seconds(0.9996), seconds(math.inf)
    ('10.0 s', '1.00 s', '?')
    """
    if not math.isfinite(value):
        return "?"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        scaled = value * scale
        if abs(scaled) >= 0.9995 or (unit == "us" and value):  # 999.5 would round to 1000 of the next unit
            return f"{scaled:.{_decimals(scaled)}f} {unit}"
    return "0 s"


def duration(seconds: float) -> str:
    """A time to wait for, as its two largest units.

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
    # 999.5 would round to 1000 of its unit, so it belongs to the next.
    while abs(value) >= base - base / 2000 and power < len(suffixes) - 1:
        value, power = value / base, power + 1
    return f"{value:.{_decimals(value) if power else 0}f}{suffixes[power]}"


def _decimals(value: float) -> int:
    """Digits after the point of a number that has three digits once it is rounded."""
    return 2 - (abs(value) >= 9.995) - (abs(value) >= 99.95)
