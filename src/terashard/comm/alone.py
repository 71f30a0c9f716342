"""A group of one member: nothing has to travel, so nothing does.

Every axis of a mesh with extent 1 is one of these; no communicator is made for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from terashard.comm.pieces import Done, require_rows
from terashard.errors import CommunicationError


@dataclass(frozen=True, slots=True)
class AloneGroup:
    """The ``Group`` whose only member is the global rank ``member``."""

    member: int

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def size(self) -> int:
        """Always 1."""
        return 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """The only global rank."""
        return (self.member,)

    @property
    def receives_ahead(self) -> int:
        """Always 0."""
        return 0

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> NoReturn:
        """Refuse: there is nobody to send to."""
        raise CommunicationError(f"rank {self.member} is alone in its group; it has no peer {peer}")

    def receive(self, buffer: Tensor, peer: int, tag: int = 0) -> NoReturn:
        """Refuse: there is nobody to receive from."""
        raise CommunicationError(f"rank {self.member} is alone in its group; it has no peer {peer}")

    def gather_rows(self, full: Sequence[Tensor]) -> Done:
        """Leave ``full`` as it is: all rows are here."""
        return Done()

    def sum_scatter(self, full: Sequence[Tensor], rows: Sequence[Tensor]) -> Done:
        """Copy ``full`` into ``rows``, unless they are the same memory already."""
        require_rows(full, rows, 1, 0)
        for whole, part in zip(full, rows, strict=True):
            if whole.data_ptr() != part.data_ptr() or whole.dtype != part.dtype:
                part.data.copy_(whole.data)
        return Done()

    def sum(self, tensor: Tensor) -> Done:
        """Leave ``tensor`` as it is."""
        return Done()

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """The only payload."""
        return [payload]

    def barrier(self) -> None:
        """Return at once."""
