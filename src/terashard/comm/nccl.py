"""Groups over NCCL: GPUs. Single-tensor collectives, coalesced into one launch per call.

Where dim 0 divides evenly, rows are gathered in place by ``all_gather_single`` and summed by
``reduce_scatter_single``. Where it does not, they travel point to point in one batch. Tensors
narrower than float32 would be summed in their own type: they go through ``all_to_all_single``, of
the same volume, and are summed here in float32 and rank order. ``reduce_scatter_single`` sums in an
order of its own, the same in every step.

NCCL has no tags: messages between two ranks arrive in the order in which they were sent, and
receives must be issued in that order. One communicator per direction keeps two ranks that both
send first from waiting for each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from terashard.comm.pieces import (
    require_contiguous,
    require_rows,
    rows_of,
    sum_in_order,
    wide_dtype,
)
from terashard.comm.process import DistributedGroup, Transfers, explained, some
from terashard.comm.rows import row_counts


@dataclass(frozen=True, slots=True)
class NcclGroup(DistributedGroup):
    """A group whose handle is of the backend nccl."""

    @property
    def receives_ahead(self) -> int:
        """See ``Group.receives_ahead``: a posted receive is a kernel that spins."""
        return 0

    def barrier(self) -> None:
        """See ``Group.barrier``."""
        here = torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()))
        self.sum(here).wait()
        here.item()

    def gather_rows(self, full: Sequence[Tensor]) -> Transfers:
        """See ``Group.gather_rows``."""
        what = self.where("gather_rows")
        for tensor in full:
            require_contiguous(tensor, what)
        even = [tensor for tensor in full if self._even(tensor)]
        uneven = [tensor for tensor in full if not self._even(tensor)]
        calls = [(tensor.data, rows_of(tensor, self.size, self.rank)) for tensor in even]
        with explained(what):
            works = self._coalesced(dist.all_gather_single, calls) + self._batch(uneven)
        return Transfers(what, works, kept=list(full))

    def sum_scatter(self, full: Sequence[Tensor], rows: Sequence[Tensor]) -> Transfers:
        """See ``Group.sum_scatter``."""
        what = self.where("sum_scatter")
        require_rows(full, rows, self.size, self.rank)
        for tensor in full:
            require_contiguous(tensor, what)
        calls: list[tuple[Tensor, Tensor]] = []
        sums: list[tuple[Sequence[Tensor], Tensor]] = []
        works: list[dist.Work] = []
        with explained(what):
            for whole, out in zip(full, rows, strict=True):
                if not self._even(whole) or wide_dtype(whole.dtype) != whole.dtype:
                    parts, work = self._parts(whole)
                    works += work
                    sums.append((parts, out))
                elif whole.dtype == out.dtype and out.is_contiguous():
                    calls.append((out.data, whole.data))
                else:
                    total = torch.empty_like(out, dtype=whole.dtype)
                    calls.append((total, whole.data))
                    sums.append(([total], out))
            works += self._coalesced(dist.reduce_scatter_single, calls)

        def finish() -> None:
            for parts, out in sums:
                sum_in_order(parts, out)

        return Transfers(what, works, finish, list(full))

    def _even(self, tensor: Tensor) -> bool:
        return tensor.shape[0] % self.size == 0

    def _parts(self, whole: Tensor) -> tuple[Sequence[Tensor], list[dist.Work]]:
        """Every member's version of this member's rows, by position, once the works are done."""
        counts = row_counts(whole.shape[0], self.size)
        own = counts[self.rank]
        parts = whole.new_empty((self.size * own, *whole.shape[1:]))
        work = dist.all_to_all_single(
            parts, whole.data, [own] * self.size, counts, group=self.handle, async_op=True
        )
        return parts.view(self.size, own, *whole.shape[1:]).unbind(0), some(work)

    def _coalesced(
        self, call: Callable[..., object], calls: list[tuple[Tensor, Tensor]]
    ) -> list[dist.Work]:
        calls = [(out, source) for out, source in calls if source.numel()]
        if not calls:
            return []
        with _coalescing_manager(self.handle, async_ops=True) as manager:
            for out, source in calls:
                call(out, source, group=self.handle, async_op=True)
        return list(manager.works)

    def _batch(self, full: Sequence[Tensor]) -> list[dist.Work]:
        """Complete ``full`` point to point."""
        ops: list[dist.P2POp] = []
        for tensor in full:
            own = rows_of(tensor, self.size, self.rank)
            for peer in self.peers():
                rows = rows_of(tensor, self.size, peer)
                if rows.numel():
                    ops.append(dist.P2POp(dist.irecv, rows, group=self.handle, group_peer=peer))
                if own.numel():
                    ops.append(dist.P2POp(dist.isend, own, group=self.handle, group_peer=peer))
        return list(dist.batch_isend_irecv(ops)) if ops else []
