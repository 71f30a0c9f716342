"""Gathers and sums through objects of the caller's own, in the protocol of torch's ``Comm``.

Such an object allocates a flat buffer and moves one flat tensor; the pieces are packed into it, one
call per format, rows that do not divide evenly padded. Everything else goes as before.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from terashard.comm.group import Group, Work
from terashard.comm.pieces import rows_of
from terashard.comm.process import Transfers, some


@dataclass(frozen=True, slots=True, eq=False)
class CustomGroup:
    """``inner``, but for the one exchange that ``gather`` or ``scatter`` takes over."""

    inner: Group
    handle: dist.ProcessGroup
    gather: Any = None
    scatter: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def gather_rows(self, full: Sequence[Tensor]) -> Work:
        """See ``Group.gather_rows``."""
        if self.gather is None:
            return self.inner.gather_rows(full)
        works: list[dist.Work] = []
        packs = list(self._packs(full))
        for pack in packs:
            own = pack.allocate(self.gather, 1)
            whole = pack.allocate(self.gather, self.inner.size)
            pack.put(own, self.inner.rank)
            work = self.gather(
                output_tensor=whole, input_tensor=own, group=self.handle, async_op=True
            )
            works += some(work)
            pack.whole = whole

        def finish() -> None:
            for pack in packs:
                for member, flat in enumerate(pack.whole.chunk(self.inner.size)):
                    pack.take(flat, member)

        return Transfers("a custom all-gather", works, finish, list(full))

    def sum_scatter(self, full: Sequence[Tensor], rows: Sequence[Tensor]) -> Work:
        """See ``Group.sum_scatter``."""
        if self.scatter is None:
            return self.inner.sum_scatter(full, rows)
        works: list[dist.Work] = []
        packs = list(self._packs(full))
        for pack in packs:
            whole = pack.allocate(self.scatter, self.inner.size)
            for member, flat in enumerate(whole.chunk(self.inner.size)):
                pack.put(flat, member)
            pack.whole = pack.allocate(self.scatter, 1)
            work = self.scatter(
                output_tensor=pack.whole,
                input_tensor=whole,
                group=self.handle,
                op=dist.ReduceOp.SUM,
                async_op=True,
            )
            works += some(work)

        def finish() -> None:
            for pack in packs:
                for place, piece in pack.pieces(pack.whole, self.inner.rank):
                    rows[place].copy_(piece)

        return Transfers("a custom reduce-scatter", works, finish, list(full))

    def _packs(self, full: Sequence[Tensor]) -> "Iterator[_Pack]":
        formats = dict.fromkeys(tensor.dtype for tensor in full)
        for dtype in formats:
            places = [place for place, tensor in enumerate(full) if tensor.dtype == dtype]
            yield _Pack([full[place] for place in places], places, self.inner.size)


class _Pack:
    """Tensors of one format, member by member, in one flat tensor."""

    def __init__(self, tensors: Sequence[Tensor], places: Sequence[int], members: int) -> None:
        self.tensors, self.places, self.members = tensors, places, members
        self.each = [
            -(-tensor.shape[0] // members) * (tensor[:1].numel() if len(tensor) else 0)
            for tensor in tensors
        ]
        self.whole = torch.empty(0)

    def allocate(self, comm: Any, members: int) -> Tensor:
        """A flat tensor for the rows of so many members."""
        first = self.tensors[0]
        flat: Tensor = comm.allocate(
            (sum(self.each) * members,), dtype=first.dtype, device=first.device
        )
        return flat.zero_()

    def put(self, flat: Tensor, member: int) -> None:
        """Write the rows of ``member`` into ``flat``."""
        self._each(flat, member, lambda piece, rows: piece.copy_(rows))

    def take(self, flat: Tensor, member: int) -> None:
        """Write ``flat`` into the rows of ``member``."""
        self._each(flat, member, lambda piece, rows: rows.copy_(piece))

    def pieces(self, flat: Tensor, member: int) -> Iterator[tuple[int, Tensor]]:
        """The parts of ``flat`` that are rows of ``member``, with the places of their tensors."""
        start = 0
        for place, tensor, length in zip(self.places, self.tensors, self.each, strict=True):
            rows = rows_of(tensor, self.members, member)
            yield place, flat[start : start + rows.numel()].view(rows.shape)
            start += length

    def _each(self, flat: Tensor, member: int, act: Callable[[Tensor, Tensor], object]) -> None:
        for (_, piece), tensor in zip(self.pieces(flat, member), self.tensors, strict=True):
            act(piece, rows_of(tensor, self.members, member))
