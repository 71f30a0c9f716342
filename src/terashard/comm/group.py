"""What shard, runtime and train ask of communication, whoever carries it.

A ``Group`` is a fixed, ordered set of members: threads of one process (``threads.py``, for tests
and examples), processes over ``torch.distributed`` (``process.py``; by backend ``gloo.py``,
``nccl.py``, ``collectives.py``), one alone. Above this floor nothing calls the communication of
``torch.distributed`` itself; DTensors, which redistribute themselves, are the exception.

Sends are *buffered*: ``send`` returns at once, and the tensor must stay unchanged until its
``Work`` was waited for. Collectives of one group must be issued in the same order by all members.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Work(Protocol):
    """An operation that was issued and may not have finished."""

    def wait(self, timeout: float | None = None) -> None:
        """Block until the operation is finished; ``timeout`` in seconds, by default the group's.

        Raises ``CommunicationError`` if a peer is gone or too late. On a GPU, without ``timeout``,
        it is the stream that waits, not the host.
        """


class Group(Protocol):
    """An ordered set of ranks that exchange tensors."""

    @property
    def rank(self) -> int:
        """This member's position in the group, 0 ≤ rank < size."""

    @property
    def size(self) -> int:
        """How many members there are."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global rank of every member, in order of position."""

    @property
    def receives_ahead(self) -> int:
        """How many receives of one sender are best posted before their turn.

        2 where a posted receive costs nothing but its buffer, so that messages travel while the
        rank computes. 0 where it is a kernel that spins on the GPU until its message comes (NCCL):
        post it when its turn has come.
        """

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> Work:
        """Send a contiguous ``tensor`` to the member at position ``peer``."""

    def receive(self, buffer: Tensor, peer: int, tag: int = 0) -> Work:
        """Receive into a contiguous ``buffer``, of the sent shape and type, from ``peer``."""

    def gather_rows(self, full: Sequence[Tensor]) -> Work:
        """Complete every tensor in place.

        This member's own rows (``row_range`` of dim 0) are there already; those of the others are
        fetched.
        """

    def sum_scatter(self, full: Sequence[Tensor], rows: Sequence[Tensor]) -> Work:
        """``rows[j]`` becomes the sum over members of their ``full[j]`` at *this* member's rows.

        Sums are taken in rank order, in the wider of float32 and the tensors' own type; a backend
        that sums by itself (NCCL) keeps its own order. ``full`` is left as it was.
        """

    def sum(self, tensor: Tensor) -> Work:
        """Sum ``tensor`` in place over all members; all end with bitwise the same values."""

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every member's ``payload``, of any length, in order of position.

        Blocking; for set-up, not for steps.
        """

    def barrier(self) -> None:
        """Return once every member has called it."""
