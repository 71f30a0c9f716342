"""Groups over any backend of torch.distributed that has collectives, in the plainest way.

For backends without a faster way of their own (``gloo.py``, ``nccl.py``), such as the one between
threads of one process that torch's tests use. Rows that do not divide evenly are padded on the way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from terashard.comm.alone import AloneGroup
from terashard.comm.gloo import GlooGroup
from terashard.comm.group import Group
from terashard.comm.nccl import NcclGroup
from terashard.comm.pieces import require_contiguous, require_rows, rows_of, sum_in_order
from terashard.comm.process import DistributedGroup, Transfers, explained, some
from terashard.comm.rows import row_counts

Maker = Callable[[dist.ProcessGroup, tuple[int, ...], str], DistributedGroup]

MAKERS: dict[str, Maker] = {"gloo": GlooGroup, "nccl": NcclGroup}
"""By backend: what makes a group of it; ``CollectiveGroup`` for the others."""

_TWINS = WeakIdKeyDictionary()
"""By group: another one over the same ranks."""


def group_over(handle: dist.ProcessGroup, name: str) -> Group:
    """The group of torch's ``handle``, in the fastest way of its backend."""
    ranks = tuple(dist.get_process_group_ranks(handle))
    if len(ranks) == 1:
        return AloneGroup(ranks[0])
    return maker_of(handle)(handle, ranks, name)


def maker_of(handle: dist.ProcessGroup) -> Maker:
    """What makes a group of torch's ``handle``, in the fastest way of its backend."""
    return MAKERS.get(backend_of(handle), CollectiveGroup)


def backend_of(handle: dist.ProcessGroup) -> str:
    """The backend that carries the tensors of ``handle``, "gloo" say.

    A group that was made without naming one has several, one by kind of device.
    """
    named = str(dist.get_backend(handle))
    kinds = {device.type for device in handle._device_types}
    if named in MAKERS or not kinds:
        return named
    kind = "cuda" if "cuda" in kinds and torch.cuda.is_available() else "cpu"
    return str(handle._get_backend(torch.device(kind)).name())


def twin_of(handle: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks with a communicator of its own, made at the first call."""
    if handle not in _TWINS:
        ranks = dist.get_process_group_ranks(handle)
        _TWINS[handle] = dist.new_group(
            ranks, use_local_synchronization=True, group_desc=f"twin of {handle.group_name}"
        )
    twin: dist.ProcessGroup = _TWINS[handle]
    return twin


def broadcast(tensor: Tensor, handle: dist.ProcessGroup | None = None) -> None:
    """Give ``tensor`` the values of the first rank of ``handle``, of all ranks by default."""
    if dist.is_initialized():
        whole = tensor.contiguous()
        dist.broadcast(whole, group=handle, group_src=0)
        if whole is not tensor:
            tensor.copy_(whole)


def add_up(tensor: Tensor, handle: dist.ProcessGroup | None = None) -> int:
    """Sum ``tensor`` over the ranks of ``handle``, all by default, in place; how many there are."""
    if not dist.is_initialized():
        return 1
    dist.all_reduce(tensor, group=handle)
    return dist.get_world_size(handle)


def leads() -> bool:
    """Whether this process is rank 0 of all, or alone."""
    return not dist.is_initialized() or dist.get_rank() == 0


def sent(value: Any) -> Any:
    """The ``value`` of rank 0, on all ranks."""
    said = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(said, src=0)
    return said[0]


def first_problem(problem: str | None) -> str | None:
    """What the first rank that has a problem says of it, on all ranks; None if all are well."""
    if not dist.is_initialized():
        return problem
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, problem)
    return next((one for one in said if one is not None), None)


def full_of(tensor: DTensor) -> Tensor:
    """All of ``tensor``, on every rank of its mesh; all of them must ask."""
    whole: Tensor = tensor.full_tensor()
    return whole


@dataclass(frozen=True, slots=True)
class CollectiveGroup(DistributedGroup):
    """A group whose handle is of any backend."""

    @property
    def receives_ahead(self) -> int:
        """See ``Group.receives_ahead``."""
        return 0

    def gather_rows(self, full: Sequence[Tensor]) -> Transfers:
        """See ``Group.gather_rows``."""
        what = self.where("gather_rows")
        works: list[dist.Work] = []
        padded: list[tuple[Tensor, Tensor]] = []
        for tensor in full:
            require_contiguous(tensor, what)
            target, own = self._target(tensor)
            if target.data_ptr() != tensor.data_ptr():
                padded.append((tensor, target))
            with explained(what):
                work = dist.all_gather_single(target, own, group=self.handle, async_op=True)
            works += some(work)

        def finish() -> None:
            for tensor, target in padded:
                tensor.data.copy_(target[: tensor.shape[0]])

        return Transfers(what, works, finish, list(full))

    def sum_scatter(self, full: Sequence[Tensor], rows: Sequence[Tensor]) -> Transfers:
        """See ``Group.sum_scatter``."""
        what = self.where("sum_scatter")
        require_rows(full, rows, self.size, self.rank)
        works: list[dist.Work] = []
        parts: list[Tensor] = []
        for tensor in full:
            require_contiguous(tensor, what)
            counts = row_counts(tensor.shape[0], self.size)
            own = counts[self.rank]
            part = tensor.new_empty((self.size * own, *tensor.shape[1:]))
            with explained(what):
                work = dist.all_to_all_single(
                    part, tensor.data, [own] * self.size, counts, group=self.handle, async_op=True
                )
            works += some(work)
            parts.append(part)

        def finish() -> None:
            for part, out in zip(parts, rows, strict=True):
                sum_in_order(part.view(self.size, *out.shape).unbind(0), out)

        return Transfers(what, works, finish, list(full))

    def _target(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Where to gather ``tensor``, with this member's rows of it in their place."""
        own = rows_of(tensor, self.size, self.rank)
        if tensor.shape[0] % self.size == 0:
            return tensor.data, own.clone()
        each = -(-tensor.shape[0] // self.size)
        target = tensor.new_empty((self.size * each, *tensor.shape[1:]))
        mine = tensor.new_zeros((each, *tensor.shape[1:]))
        mine[: own.shape[0]].copy_(own)
        return target, mine
