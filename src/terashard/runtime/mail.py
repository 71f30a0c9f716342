"""The messages of one rank during one step.

Receives are posted before their turn, so that a message travels while the rank computes: as many in
each direction as its group says (``Group.receives_ahead``), because every one holds a buffer, and
on some transports more. What was sent is kept until the other rank has surely taken it
(``part.py``), the rest until the end of the step: nothing ever waits for a send that a rank has not
got round to receiving.
"""

from collections import deque
from collections.abc import Callable

from torch import Tensor

from terashard.comm.group import Group, Work
from terashard.comm.mesh import Mesh
from terashard.runtime.part import Part, Sent
from terashard.schedule.actions import Cell, Receive, Send, Way


class Mail:
    """Sends and receives of the step that performs ``part``.

    ``new_buffer`` makes the tensor that what travels into a cell is received into.
    """

    def __init__(self, part: Part, mesh: Mesh, new_buffer: Callable[[Cell], Tensor]) -> None:
        self._part, self._mesh, self._new_buffer = part, mesh, new_buffer
        self._due = {way: deque(receives) for way, receives in part.receives.items()}
        self._posted: dict[Receive, tuple[Tensor, Work]] = {}
        self._sent: dict[Sent, tuple[Send, Work]] = {}
        for way in self._due:
            for _ in range(self._group(way).receives_ahead):
                self._post(way)

    def send(self, action: Send, value: Tensor) -> None:
        """Send ``value`` and return at once."""
        work = self._group(action.way).send(value.contiguous(), self._rank_of(action.to))
        self._sent[action.cell, action.to] = action, work

    def receive(self, action: Receive) -> Tensor:
        """Wait for the message of ``action``; let go of what it acknowledges."""
        if action not in self._posted:
            self._post(action.way)
        buffer, work = self._posted.pop(action)
        work.wait()
        if self._group(action.way).receives_ahead:
            self._post(action.way)
        for sent in self._part.acknowledged[action]:
            self._sent.pop(sent)[1].wait()
        return buffer

    def unfinished(self) -> list[tuple[Send, Work]]:
        """Sends that no message has acknowledged, and their works."""
        return list(self._sent.values())

    def _post(self, way: Way) -> None:
        """Post the next receive of one direction, if there is one left."""
        if self._due[way]:
            action = self._due[way].popleft()
            buffer = self._new_buffer(action.cell)
            work = self._group(way).receive(buffer, self._rank_of(action.source))
            self._posted[action] = buffer, work

    def _group(self, way: Way) -> Group:
        return self._mesh.down if way == "down" else self._mesh.up

    def _rank_of(self, stage: int) -> int:
        return self._part.schedule.grid.rank_of(stage)
