"""Bytes, seconds, tokens and floating-point operations: how people write and read them.

A quantity is a number, an optional space and an optional unit::

    bytes      512   "16GiB"  "1.5 TB"    Ki Mi Gi Ti Pi: powers of 1024; k M G T P: powers of 1000
    seconds    90    "1.5 h"  "20ms"      ns us ms s min h d
    tokens     4096  "128k"   "1.5M"      k is 1024 after a power of two (4k, 128k), else 1000
    flops      1e12  "3.2 TFLOP"          k M G T P E Z: powers of 1000; FLOP, FLOPS, FLOP/s alike

``parse_*`` reads one, ``show_*`` prints one with three significant digits::

    >>> parse_bytes("16GiB"), parse_seconds("1.5 h"), parse_tokens("128k"), parse_tokens("100k")
    (17179869184, 5400.0, 131072, 100000)
    >>> show_bytes(17179869184), show_seconds(0.00314), show_tokens(131072), show_flops(3.2e12)
    ('16.0 GiB', '3.14 ms', '131k', '3.20 TFLOP')
"""

import math
import re
from collections.abc import Mapping

from terashard.errors import ConfigError

_NUMBER = re.compile(r"\s*([0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([^\s0-9]*)\s*")
_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "Z": 1e21}
_BINARY = {f"{letter}i": 1024.0**i for i, letter in enumerate("KMGTP", start=1)}
_BYTES = {f"{p}B": f for p, f in {**_DECIMAL, **_BINARY}.items() if p not in ("E", "Z")}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TOKENS = {p: _DECIMAL[p] for p in ("", "k", "M", "G", "T")} | {"B": 1e9}


def parse_bytes(text: str | float) -> int:
    """Bytes written as a number or as "16GiB", "16Gi", "80 GB", "512"."""
    units = _BYTES | {unit.removesuffix("B"): factor for unit, factor in _BYTES.items()}
    value, unit = _split(text, "bytes", units, 'e.g. "16GiB", "80 GB" or 512')
    return round(value * units[unit])


def parse_seconds(text: str | float) -> float:
    """Seconds written as a number or as "20ms", "90 s", "5 min", "1.5 h"."""
    units = _SECONDS | {"": 1.0, "µs": 1e-6}
    value, unit = _split(text, "a time", units, 'e.g. "20ms", "1.5 h" or 90')
    return value * units[unit]


def parse_tokens(text: str | float) -> int:
    """Tokens written as a number or as "128k", "100k", "1.5M", "2B".

    The field says 128k for 131,072: after a power of two, k is 1024.
    """
    value, unit = _split(text, "tokens", _TOKENS, 'e.g. "128k", "1.5M" or 4096')
    binary = unit == "k" and value >= 1 and math.log2(value).is_integer()
    return round(value * (1024 if binary else _TOKENS[unit]))


def parse_flops(text: str | float) -> float:
    """Operations, or operations per second, written as a number or as "989 TFLOPS", "3.2T"."""
    units = {p + tail: f for p, f in _DECIMAL.items() for tail in ("", "FLOP", "FLOPS", "FLOP/s")}
    value, unit = _split(text, "operations", units, 'e.g. "989 TFLOPS", "3.2T" or 1e12')
    return value * units[unit]


def show_bytes(count: float, width: int = 0) -> str:
    """Bytes with three significant digits in powers of 1024, right-aligned to ``width``."""
    return _scaled(count, {"B": 1.0} | {f"{p}B": f for p, f in _BINARY.items()}, width)


def show_seconds(seconds: float, width: int = 0) -> str:
    """A time with three significant digits up to a minute, then as m:ss, h:mm:ss or days."""
    if not math.isfinite(seconds) or abs(seconds) < 59.95:
        small = {unit: _SECONDS[unit] for unit in ("ns", "us", "ms", "s")}
        return _scaled(seconds, small, width)
    total = round(abs(seconds))
    minutes, rest = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    text = f"{hours}:{minutes:02d}:{rest:02d}" if hours or days else f"{minutes}:{rest:02d}"
    sign = "-" if seconds < 0 else ""
    return f"{sign}{f'{days} d ' if days else ''}{text}".rjust(width)


def show_tokens(count: float, width: int = 0) -> str:
    """Tokens with three significant digits in powers of 1000: "131k"; below 1000 as they are."""
    return _scaled(count, {p: _TOKENS[p] for p in ("", "k", "M", "G", "T")}, width)


def show_flops(count: float, width: int = 0) -> str:
    """Floating-point operations with three significant digits: "3.20 TFLOP"."""
    return _scaled(count, {f"{p}FLOP": f for p, f in _DECIMAL.items()}, width)


def significant(value: float) -> str:
    """A number with three significant digits and no exponent: 0.0314, 3.14, 31.4, 314, 3140."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, digits)
    if abs(rounded) >= 10.0 ** (
        3 - digits
    ):  # 9.996 became 10.00: one digit more stands before the point
        digits -= 1
    return f"{rounded:.{max(digits, 0)}f}"


def _split(
    text: str | float, what: str, units: Mapping[str, float], example: str
) -> tuple[float, str]:
    match = _NUMBER.fullmatch(str(text))
    allowed = ", ".join(unit for unit in units if unit)
    if match is None:
        raise ConfigError(f"{text!r} is no number of {what}; write a number and a unit, {example}")
    unit = _same_unit(match[2], units)
    if unit is None:
        raise ConfigError(f"{text!r} has the unknown unit {match[2]!r}; allowed are {allowed}")
    return float(match[1].replace("_", "")), unit


def _same_unit(unit: str, units: Mapping[str, float]) -> str | None:
    """The allowed spelling of ``unit``: exact, or the only one that differs in case alone."""
    if unit in units:
        return unit
    alike = [known for known in units if known.lower() == unit.lower()]
    return alike[0] if len(alike) == 1 else None


def _scaled(value: float, units: Mapping[str, float], width: int) -> str:
    """``value`` in the largest unit of which it is at least one, after rounding to three digits."""
    chosen = next(unit for unit, factor in units.items() if factor == 1.0 or value)
    for unit, factor in units.items():
        if abs(value) >= factor * 0.9995:
            chosen = unit
    scaled = value / units[chosen]
    whole = units[chosen] == 1.0 and float(scaled).is_integer()
    number = f"{scaled:.0f}" if whole else significant(scaled)
    gap = "" if "" in units else " "
    return f"{number}{gap}{chosen}".rjust(width)
