"""Where the tensors of a unit lie in one flat buffer.

Tensors follow each other in order, each starting at a multiple of ``_ALIGNMENT`` elements (a cache
line in every format in use). The gaps are never written, so they stay zero in a buffer that began
as zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Shapes and first elements of the tensors, and the length of the buffer that holds them."""

    shapes: tuple[torch.Size, ...]
    starts: tuple[int, ...]
    numel: int

    @classmethod
    def of(cls, shapes: Sequence[torch.Size]) -> "FlatLayout":
        """Lay ``shapes`` out one after the other."""
        starts, end = [], 0
        for shape in shapes:
            starts.append(end)
            end += -(-prod(shape) // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(shapes), tuple(starts), end)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors as views of ``flat``, which has at least ``numel`` elements."""
        return [
            flat[start : start + prod(shape)].view(shape)
            for shape, start in zip(self.shapes, self.starts, strict=True)
        ]
