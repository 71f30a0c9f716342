"""Groups between threads of one process, for tests and examples: exact and quick.

A message is copied when it is sent, and copied again into the receiver's buffer when that
``Work`` is waited for. The k-th ``receive`` of a (source, destination, tag) gets the k-th
``send``, in whatever order they are waited for. The k-th collective of every member must be the
same one, on tensors of the same shapes and types; otherwise a ``CommunicationError`` names two
members that differ.

Three traps of threads. Grad mode is a thread's own: a new thread records gradients even if its
starter did not. The default dtype and the global random generator belong to the whole process:
name dtypes, and use generators of your own. A thread that runs parallel kernels brings its own
pool: call ``torch.set_num_threads(1)`` once, before.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from terashard.comm.pieces import (
    Done,
    require_contiguous,
    require_peer,
    require_rows,
    rows_of,
    sum_in_order,
)
from terashard.comm.rooms import Bell, Room
from terashard.errors import CommunicationError

T = TypeVar("T")


class ThreadWorld:
    """``size`` ranks that are threads; a wait longer than ``timeout`` seconds is an error."""

    def __init__(self, size: int, timeout: float = 30.0) -> None:
        self.size = size
        self._bell = Bell(size, timeout)
        self._rooms: dict[tuple[str, tuple[int, ...]], Room] = {}

    def group(self, rank: int, ranks: Sequence[int], name: str) -> "ThreadGroup":
        """Global ``rank``'s view of the group ``name`` of ``ranks``; names keep traffic apart."""
        members = tuple(ranks)
        if rank not in members or not set(members) <= set(range(self.size)):
            raise CommunicationError(
                f"rank {rank} asks for group {name!r} of ranks {members} in a world of {self.size};"
                " a group holds ranks of the world, its caller among them"
            )
        with self._bell.lock:
            room = self._rooms.setdefault((name, members), Room(self._bell, name, members))
        return ThreadGroup(room, members.index(rank))

    def abort(self, failure: BaseException) -> None:
        """Wake all waiting ranks with a ``CommunicationError`` that tells the first ``failure``."""
        self._bell.abort(failure)

    @property
    def failure(self) -> BaseException | None:
        """Why the world was aborted, or None."""
        return self._bell.failure


@dataclass(slots=True)
class _Pending:
    """A ``Work`` whose effect happens when it is first waited for."""

    finish: Callable[[float | None], None] | None

    def wait(self, timeout: float | None = None) -> None:
        """Finish, unless that was done before; ``timeout`` in seconds, by default the world's."""
        if self.finish is not None:
            self.finish(timeout)
            self.finish = None


@dataclass(frozen=True, slots=True)
class ThreadGroup:
    """One rank's view of a group of a ``ThreadWorld``; made by ``ThreadWorld.group``."""

    room: Room
    rank: int

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.room.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks by position."""
        return self.room.ranks

    @property
    def receives_ahead(self) -> int:
        """See ``Group.receives_ahead``."""
        return 2

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> Done:
        """See ``Group.send``."""
        self._check_message(tensor, peer, "send")
        self.room.put((self.rank, peer, tag), tensor.data.clone())
        return Done()

    def receive(self, buffer: Tensor, peer: int, tag: int = 0) -> _Pending:
        """See ``Group.receive``."""
        self._check_message(buffer, peer, "receive")
        route = (peer, self.rank, tag)
        number = self.room.ask(route)

        def finish(timeout: float | None) -> None:
            message: Tensor = self.room.take(route, number, timeout)
            if _kind(message) != _kind(buffer):
                raise CommunicationError(
                    f"{self._where(f'message {number} of rank {self.ranks[peer]}, tag {tag}')} is"
                    f" {_kind(message)}, but the buffer is {_kind(buffer)}; both sides must agree"
                )
            buffer.data.copy_(message)

        return _Pending(finish)

    def gather_rows(self, full: Sequence[Tensor]) -> _Pending:
        """See ``Group.gather_rows``."""
        for tensor in full:
            require_contiguous(tensor, self._where("gather_rows"))

        def write(brought: list[list[Tensor]]) -> None:
            for member, rows in enumerate(brought):
                if member != self.rank:
                    for tensor, part in zip(full, rows, strict=True):
                        rows_of(tensor, self.size, member).copy_(part)

        own = [rows_of(tensor, self.size, self.rank).clone() for tensor in full]
        return self._meet(f"gather_rows({_kinds(full)})", own, write)

    def sum_scatter(self, full: Sequence[Tensor], rows: Sequence[Tensor]) -> _Pending:
        """See ``Group.sum_scatter``."""
        require_rows(full, rows, self.size, self.rank)
        for tensor in full:
            require_contiguous(tensor, self._where("sum_scatter"))

        def write(brought: list[list[Tensor]]) -> None:
            for j, out in enumerate(rows):
                sum_in_order([rows_of(part[j], self.size, self.rank) for part in brought], out)

        copies = [tensor.data.clone() for tensor in full]
        return self._meet(f"sum_scatter({_kinds(full)})", copies, write)

    def sum(self, tensor: Tensor) -> _Pending:
        """See ``Group.sum``."""
        require_contiguous(tensor, self._where("sum"))

        def write(brought: list[Tensor]) -> None:
            sum_in_order(brought, tensor)

        return self._meet(f"sum({_kind(tensor)})", tensor.data.clone(), write)

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """See ``Group.gather_bytes``."""
        result: list[bytes] = []
        self._meet("gather_bytes", payload, result.extend).wait()
        return result

    def barrier(self) -> None:
        """See ``Group.barrier``."""
        self._meet("barrier", None, lambda brought: None).wait()

    def _meet(self, title: str, brings: Any, write: Callable[[list[Any]], None]) -> _Pending:
        number = self.room.enter(self.rank, title, brings)
        return _Pending(lambda timeout: write(self.room.meet(self.rank, number, timeout)))

    def _check_message(self, tensor: Tensor, peer: int, what: str) -> None:
        require_peer(peer, self.rank, self.size, self._where(what))
        require_contiguous(tensor, self._where(what))

    def _where(self, what: str) -> str:
        return self.room.where(self.rank, what)


def run_threads(size: int, function: Callable[[ThreadWorld, int], T]) -> list[T]:
    """Run ``function(world, rank)`` in a thread per rank: all results, or the first exception."""
    world = ThreadWorld(size)
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = function(world, rank)
        except BaseException as failure:
            world.abort(failure)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as failure:  # Ctrl-C arrives here: let the ranks go before leaving
        world.abort(failure)
        raise
    if world.failure is not None:
        raise world.failure
    return [results[rank] for rank in range(size)]


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.")


def _kinds(tensors: Sequence[Tensor]) -> str:
    return ", ".join(_kind(tensor) for tensor in tensors)
