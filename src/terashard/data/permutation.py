r"""A random order of n samples that needs no memory: a keyed bijection of 0 … n-1.

Put position ``x`` on a grid of ``a x b`` cells, ``a = ⌈√n⌉`` and ``b = ⌈n/a⌉``, as ``x = b·l + r``.
Rounds of

.. math:: l ← (l + F_k(r)) \bmod a, \qquad r ← (r + F_{k+1}(l)) \bmod b

are each undone by subtracting, so their composition permutes the grid. Fewer than ``a`` cells lie
beyond ``n``; a position that lands there is sent round again until it comes back, which it must,
because it started inside. ``F_k`` mixes 64 bits with the key ``k``; keys are drawn from (seed,
epoch).

Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (CT-RSA 2002), generalised Feistel
with cycle-walking. The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
"""

from dataclasses import dataclass
from hashlib import blake2b
from math import isqrt
from typing import Self

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Permutation:
    """The bijection of ``range(size)`` that ``keys`` choose (an even number of them)."""

    size: int
    keys: tuple[int, ...]

    @classmethod
    def of_epoch(cls, size: int, seed: int, epoch: int) -> Self:
        """The order of pass number ``epoch`` over ``size`` samples."""
        digest = blake2b(f"terashard sample order {seed} {epoch}".encode()).digest()
        keys = (int.from_bytes(digest[at : at + 8], "little") for at in range(0, 64, 8))
        return cls(size, tuple(keys))

    def __call__(self, position: int) -> int:
        """Which sample stands at ``position``, 0 ≤ position < size."""
        rows = isqrt(self.size - 1) + 1
        columns = -(-self.size // rows)
        while True:
            left, right = divmod(position, columns)
            for even, odd in zip(self.keys[::2], self.keys[1::2], strict=True):
                left = (left + _mix(right, even)) % rows
                right = (right + _mix(left, odd)) % columns
            position = left * columns + right
            if position < self.size:
                return position


def _mix(value: int, key: int) -> int:
    z = (value + key) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
