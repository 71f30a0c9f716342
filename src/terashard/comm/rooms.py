"""Where threads meet: numbered messages, numbered meetings, and waits that end. Knows no tensors.

A ``Bell`` holds the one lock, a wake-up per rank, and the first failure. A ``Room`` is what the
members of one group share. The k-th take of a (source, destination, tag) gets the k-th put, in
whatever order they are waited for. The k-th meeting of every member must have the same title.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from terashard.errors import CommunicationError


class Bell:
    """The lock of all rooms of one world, and how its ``size`` ranks are woken."""

    def __init__(self, size: int, timeout: float) -> None:
        self.lock = threading.Lock()
        self.timeout = timeout
        self.failure: BaseException | None = None
        self._wakes = [threading.Condition(self.lock) for _ in range(size)]

    def ring(self, rank: int) -> None:
        """Let ``rank`` look again; the caller holds the lock."""
        self._wakes[rank].notify_all()

    def abort(self, failure: BaseException) -> None:
        """Make every wait, now and later, raise; the first ``failure`` is the one they tell."""
        with self.lock:
            self.failure = self.failure or failure
            for wake in self._wakes:
                wake.notify_all()

    def check(self, who: str) -> None:
        """Raise if a rank has failed."""
        if self.failure is not None:
            raise CommunicationError(
                f"{who}: another rank failed with {type(self.failure).__name__}: {self.failure}"
            ) from self.failure

    def wait_until(
        self, rank: int, ready: Callable[[], bool], who: Callable[[], str], timeout: float | None
    ) -> None:
        """Sleep until ``ready()``, the lock held by the caller; ``who()`` names the wait."""
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        while not ready():
            if self.failure is not None:
                self.check(who())
            left = deadline - time.monotonic()
            if left <= 0:
                raise CommunicationError(f"{who()}, and it did not come within {limit:g} s")
            self._wakes[rank].wait(left)


@dataclass(slots=True)
class _Channel:
    """Messages from one position to another under one tag, numbered in the order of their puts."""

    messages: dict[int, Any] = field(default_factory=dict)
    put: int = 0
    asked: int = 0


@dataclass(slots=True)
class _Meeting:
    """One collective: what each position brought."""

    title: str
    opener: int
    brought: dict[int, Any] = field(default_factory=dict)
    left: int = 0
    fault: str = ""


class Room:
    """What the members of one group share; ``ranks`` are their global ranks by position."""

    def __init__(self, bell: Bell, name: str, ranks: tuple[int, ...]) -> None:
        self.bell = bell
        self.name = name
        self.ranks = ranks
        self._channels: dict[tuple[int, int, int], _Channel] = {}
        self._meetings: dict[int, _Meeting] = {}
        self._entered = [0] * len(ranks)

    def where(self, position: int, what: str) -> str:
        """Name who does ``what``."""
        return f"rank {self.ranks[position]}, group {self.name!r}: {what}"

    def put(self, route: tuple[int, int, int], message: Any) -> None:
        """Leave ``message`` for the taker of ``route`` (source, destination, tag)."""
        source, destination, tag = route
        with self.bell.lock:
            self.bell.check(self.where(source, f"send to position {destination}, tag {tag}"))
            channel = self._channels.setdefault(route, _Channel())
            channel.messages[channel.put] = message
            channel.put += 1
            self.bell.ring(self.ranks[destination])

    def ask(self, route: tuple[int, int, int]) -> int:
        """Number of the message that the next take of ``route`` will get."""
        with self.bell.lock:
            channel = self._channels.setdefault(route, _Channel())
            channel.asked += 1
            return channel.asked - 1

    def take(self, route: tuple[int, int, int], number: int, timeout: float | None) -> Any:
        """Wait for message ``number`` of ``route`` and take it away."""
        source, destination, tag = route

        def who() -> str:
            return self.where(
                destination, f"waits for message {number} of rank {self.ranks[source]}, tag {tag}"
            )

        with self.bell.lock:
            messages = self._channels[route].messages
            self.bell.wait_until(self.ranks[destination], lambda: number in messages, who, timeout)
            return messages.pop(number)

    def enter(self, position: int, title: str, brings: Any) -> int:
        """Bring something to this position's next meeting; its number."""
        with self.bell.lock:
            number = self._entered[position]
            self.bell.check(self.where(position, f"collective {number}, {title}"))
            self._entered[position] += 1
            meeting = self._meetings.setdefault(number, _Meeting(title, position))
            meeting.brought[position] = brings
            if meeting.title != title:
                meeting.fault = self._fault(number, meeting, position, title)
            if meeting.fault or len(meeting.brought) == len(self.ranks):
                for rank in self.ranks:
                    self.bell.ring(rank)
            if meeting.fault:
                raise CommunicationError(meeting.fault)
        return number

    def meet(self, position: int, number: int, timeout: float | None) -> list[Any]:
        """Wait until all have come to meeting ``number``: what they brought. Once per position."""
        meeting = self._meetings[number]

        def who() -> str:
            missing = [r for i, r in enumerate(self.ranks) if i not in meeting.brought]
            return self.where(
                position, f"waits in collective {number}, {meeting.title}, for ranks {missing}"
            )

        def ready() -> bool:
            return bool(meeting.fault) or len(meeting.brought) == len(self.ranks)

        with self.bell.lock:
            self.bell.wait_until(self.ranks[position], ready, who, timeout)
            if meeting.fault:
                raise CommunicationError(meeting.fault)
            meeting.left += 1
            if meeting.left == len(self.ranks):
                del self._meetings[number]
        return [meeting.brought[i] for i in range(len(self.ranks))]

    def _fault(self, number: int, meeting: _Meeting, position: int, title: str) -> str:
        return (
            f"group {self.name!r}, collective {number}: rank {self.ranks[meeting.opener]} calls"
            f" {meeting.title}, but rank {self.ranks[position]} calls {title}; all members must"
            " issue the same collectives in the same order"
        )
