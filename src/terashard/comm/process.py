"""What groups over ``torch.distributed`` have in common, whatever carries the bytes.

``gloo.py`` and ``nccl.py`` add the exchanges of rows, each in its backend's fastest way. Every
error of torch.distributed becomes a ``CommunicationError`` that says who waited for whom and,
in one line, why it was in vain.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from terashard.comm.pieces import require_contiguous, require_peer, wide_dtype
from terashard.errors import CommunicationError

GONE = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "remote process")


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an error of torch.distributed into a ``CommunicationError`` about ``what``."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(f"{what}: {_cause(error)}") from error


@dataclass(slots=True)
class Transfers:
    """The ``Work`` of any number of torch.distributed's, finished in order, then ``finish``."""

    what: str
    works: list[dist.Work]
    finish: Callable[[], None] | None = None
    kept: list[Tensor] = field(default_factory=list)
    """Tensors that must live until the works are finished."""

    def wait(self, timeout: float | None = None) -> None:
        """Block until all is finished; ``timeout`` in seconds, by default the group's."""
        with explained(self.what):
            for work in self.works:
                if timeout is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=timeout))
        if self.finish is not None:
            self.finish()
        self.works, self.finish, self.kept = [], None, []


@dataclass(frozen=True, slots=True)
class DistributedGroup(ABC):
    """A group of processes; ``handle`` is torch's own, its members in the order of ``ranks``."""

    handle: dist.ProcessGroup
    ranks: tuple[int, ...]
    name: str

    @property
    def rank(self) -> int:
        """This member's position."""
        return self.handle.rank()

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.ranks)

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> Transfers:
        """See ``Group.send``."""
        what = self._check_message(tensor, peer, "sends to", tag)
        return self._issue(dist.isend, tensor.data, peer, tag, what)

    def receive(self, buffer: Tensor, peer: int, tag: int = 0) -> Transfers:
        """See ``Group.receive``."""
        what = self._check_message(buffer, peer, "waits for a message of", tag)
        return self._issue(dist.irecv, buffer.data, peer, tag, what)

    @property
    @abstractmethod
    def receives_ahead(self) -> int:
        """See ``Group.receives_ahead``."""

    @abstractmethod
    def gather_rows(self, full: Sequence[Tensor]) -> Transfers:
        """See ``Group.gather_rows``."""

    @abstractmethod
    def sum_scatter(self, full: Sequence[Tensor], rows: Sequence[Tensor]) -> Transfers:
        """See ``Group.sum_scatter``."""

    def sum(self, tensor: Tensor) -> Transfers:
        """See ``Group.sum``."""
        what = self.where("sum")
        require_contiguous(tensor, what)
        wide = tensor.data.to(wide_dtype(tensor.dtype))  # the tensor itself if it is wide enough
        with explained(what):
            work = dist.all_reduce(wide, group=self.handle, async_op=True)
        finish = None if wide.dtype == tensor.dtype else (lambda: put(tensor.data, wide))
        return Transfers(what, some(work), finish, [wide])

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """See ``Group.gather_bytes``."""
        payloads = [b""] * self.size
        with explained(self.where("gather_bytes")):
            dist.all_gather_object(payloads, payload, group=self.handle)
        return payloads

    def barrier(self) -> None:
        """See ``Group.barrier``."""
        with explained(self.where("barrier")):
            dist.barrier(group=self.handle)

    def where(self, what: str) -> str:
        """Name who does ``what``."""
        return f"rank {self.ranks[self.rank]}, group {self.name!r}: {what}"

    def peers(self) -> list[int]:
        """The other positions, the next one first, so that not all members begin with the same."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def _issue(
        self, call: Callable[..., dist.Work | None], tensor: Tensor, peer: int, tag: int, what: str
    ) -> Transfers:
        side = "group_dst" if call is dist.isend else "group_src"
        with explained(what):
            work = call(tensor, group=self.handle, tag=tag, **{side: peer})
        return Transfers(what, some(work), kept=[tensor])

    def _check_message(self, tensor: Tensor, peer: int, what: str, tag: int) -> str:
        require_peer(peer, self.rank, self.size, self.where(what))
        who = self.where(f"{what} rank {self.ranks[peer]}, tag {tag}")
        require_contiguous(tensor, who)
        return who


def some(work: dist.Work | None) -> list[dist.Work]:
    """``work`` as a list; torch gives None to a rank that has no part in it."""
    return [] if work is None else [work]


def put(target: Tensor, source: Tensor) -> None:
    """Copy ``source`` into ``target``."""
    target.copy_(source)


def _cause(error: RuntimeError) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = re.sub(r"^(\[[^\]]*:\d+\]\s*)+", "", lines[0])
    line = re.split(r"(?<=[\w\]])\. ", line)[0]  # torch goes on with advice that is not ours
    if any(sign in str(error) for sign in GONE):
        return f"the other process is gone, its own log says why ({line})"
    if re.search(r"time[d]?[ -]?out", str(error), re.IGNORECASE):
        return f"nothing came in time ({line})"
    return line
