"""How quantities are printed: bytes, times, counts of things, with three significant digits.

::

    >>> show_bytes(17179869184), show_seconds(0.00314), show_seconds(6102)
    ('16.0 GiB', '3.14 ms', '1:41:42')
    >>> show_count(1, "slice"), show_count(2000, "batch")
    ('1 slice', '2,000 batches')
"""

import math
from collections.abc import Mapping

_BYTES = {"B": 1.0} | {f"{p}iB": 1024.0**i for i, p in enumerate("KMGTP", start=1)}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def show_bytes(count: float) -> str:
    """Bytes with three significant digits in powers of 1024."""
    return _scaled(count, _BYTES)


def show_seconds(seconds: float) -> str:
    """A time with three significant digits up to a minute, then as m:ss, h:mm:ss or days."""
    if not math.isfinite(seconds) or abs(seconds) < 59.95:
        return _scaled(seconds, _SECONDS)
    total = round(abs(seconds))
    minutes, rest = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    text = f"{hours}:{minutes:02d}:{rest:02d}" if hours or days else f"{minutes}:{rest:02d}"
    sign = "-" if seconds < 0 else ""
    return f"{sign}{f'{days} d ' if days else ''}{text}"


def show_count(number: int, noun: str) -> str:
    """A number of things: "1 slice", "2 slices", "3 batches"."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def significant(value: float) -> str:
    """A number with three significant digits and no exponent: 0.0314, 3.14, 31.4, 314, 3140."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, digits)
    if abs(rounded) >= 10.0 ** (3 - digits):  # 9.996 became 10.00: one digit more before the point
        digits -= 1
    return f"{rounded:.{max(digits, 0)}f}"


def _scaled(value: float, units: Mapping[str, float]) -> str:
    """``value`` in the largest unit of which it is at least one, after rounding to three digits."""
    chosen = next(unit for unit, factor in units.items() if factor == 1.0 or value)
    for unit, factor in units.items():
        if abs(value) >= factor * 0.9995:
            chosen = unit
    scaled = value / units[chosen]
    whole = units[chosen] == 1.0 and float(scaled).is_integer()
    return f"{f'{scaled:.0f}' if whole else significant(scaled)} {chosen}"
