"""Where the tensors of a unit lie in one flat buffer of bytes.

Tensors of any format follow each other in order, each starting at a multiple of ``_ALIGNMENT``
bytes (two cache lines). The gaps are never written, so they stay zero in a buffer that began as
zeros.

A ``Form`` keeps the order of a tensor's dims in memory, so that a channels-last or transposed
parameter keeps its strides when it is cut and gathered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class Form:
    """Shape and format of a tensor; ``order`` lists its dims, the slowest in memory first."""

    shape: torch.Size
    dtype: torch.dtype
    order: tuple[int, ...]

    @classmethod
    def plain(cls, shape: torch.Size, dtype: torch.dtype) -> "Form":
        """The form of a contiguous tensor."""
        return cls(shape, dtype, tuple(range(len(shape))))

    @classmethod
    def like(cls, tensor: Tensor) -> "Form":
        """The form of ``tensor`` if its elements lie densely in some order, else a plain one."""
        order = tuple(range(tensor.dim()))
        if not tensor.is_contiguous():
            by_stride = tuple(sorted(order, key=lambda dim: (-tensor.stride()[dim], dim)))
            if tensor.permute(by_stride).is_contiguous():
                order = by_stride
        return cls(tensor.shape, tensor.dtype, order)

    def part(self, dim: int, length: int) -> "Form":
        """The same with another length of one dim."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return Form(torch.Size(shape), self.dtype, self.order)

    def cast(self, dtype: torch.dtype) -> "Form":
        """The same in another format."""
        return Form(self.shape, dtype, self.order)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides of a tensor of this form."""
        return (
            torch.empty(self.shape, device="meta")
            .permute(self.order)
            .contiguous()
            .permute(self._back)
            .stride()
            if self.shape
            else ()
        )

    def view(self, raw: Tensor) -> Tensor:
        """``raw``, ``nbytes`` bytes, as a tensor of this form."""
        lying = raw.view(self.dtype).view([self.shape[dim] for dim in self.order])
        return lying if self._is_plain else lying.permute(self._back)

    def lying(self, tensor: Tensor) -> Tensor:
        """A tensor of this form with its dims in the order of memory: contiguous."""
        return tensor if self._is_plain else tensor.permute(self.order)

    @property
    def _is_plain(self) -> bool:
        return all(at == dim for at, dim in enumerate(self.order))

    @property
    def _back(self) -> tuple[int, ...]:
        return tuple(self.order.index(dim) for dim in range(len(self.order)))


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Forms and first bytes of the tensors, and the length of the buffer that holds them."""

    forms: tuple[Form, ...]
    starts: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, forms: Sequence[Form]) -> "FlatLayout":
        """Lay tensors of these ``forms`` out one after the other."""
        starts, end = [], 0
        for form in forms:
            starts.append(end)
            end += -(-form.nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(forms), tuple(starts), end)

    def zeros(self, device: torch.device) -> Tensor:
        """A buffer of zeros for this layout, fit for training wherever it is made."""
        # Tensors born in inference mode can never take part in a later training step.
        with torch.inference_mode(False):
            return torch.zeros(self.nbytes, dtype=torch.uint8, device=device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors as views of ``flat``, at least ``nbytes`` bytes."""
        return [
            form.view(flat[start : start + form.nbytes])
            for form, start in zip(self.forms, self.starts, strict=True)
        ]
