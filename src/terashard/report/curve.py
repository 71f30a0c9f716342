"""A curve in the terminal: a few lines of braille dots, with the values of its ends beside it.

A braille letter holds 2 x 4 dots, so ``width`` letters show ``2 width`` values and ``height`` lines
``4 height`` levels.
"""

from collections.abc import Sequence
from itertools import pairwise

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of the dot in column c, row r (from the top) of a braille letter."""


def curve(values: Sequence[float], *, width: int = 60, height: int = 8) -> list[str]:
    """Lines of text that show ``values`` from left to right, the greatest on top."""
    if not values:
        return []
    columns = _columns(values, min(2 * width, max(2, len(values))))
    low, high = min(columns), max(columns)
    span = (high - low) or 1.0
    levels = [round((high - value) / span * (4 * height - 1)) for value in columns]
    grid = [[0] * ((len(levels) + 1) // 2) for _ in range(height)]
    for at, level in enumerate(levels):
        before = levels[at - 1] if at else level
        for dot in range(min(before, level), max(before, level) + 1):
            grid[dot // 4][at // 2] |= _DOTS[at % 2][dot % 4]
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    return [
        f"{labels.get(row, ''):>7} ┤{''.join(chr(0x2800 + bits) for bits in line)}"
        for row, line in enumerate(grid)
    ]


def _columns(values: Sequence[float], count: int) -> list[float]:
    """``count`` means of neighbouring values."""
    bounds = [i * len(values) // count for i in range(count + 1)]
    spans = [values[a : max(b, a + 1)] for a, b in pairwise(bounds)]
    return [sum(span) / len(span) for span in spans]
