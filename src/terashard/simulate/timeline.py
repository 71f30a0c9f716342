"""What ran when: predicted and measured runs are one type, so that a report is a difference.

A ``Span`` is one action of a schedule on one rank, with its start and end in seconds since the step
began.

Measured spans are the host's. On a CPU that is when the work was done. On a GPU the host only
issues it: spans then say when an action was issued, and their lengths, ``busy`` and ``idle_share``
how the host spent its time, not how busy the GPU was.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from terashard.schedule.actions import Action, Backward, Forward
from terashard.schedule.text import parse_action


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one pipeline rank, from ``start`` to ``end`` seconds."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Spans of one step."""

    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        if not self.spans:
            return 0.0
        return max(s.end for s in self.spans) - min(s.start for s in self.spans)

    def busy(self, rank: int) -> float:
        """Seconds in which ``rank`` computed; on a GPU, in which its host issued computation."""
        mine = (s for s in self.spans if s.rank == rank)
        return sum(s.end - s.start for s in mine if isinstance(s.action, Forward | Backward))

    def idle_share(self) -> float:
        """Part of all ranks' time in which they did not compute: idle over total.

        Of a run on GPUs it is the hosts' share, which tells nothing about idle GPUs.
        """
        ranks = {s.rank for s in self.spans}
        total = self.seconds * len(ranks)
        return 1.0 - sum(map(self.busy, ranks)) / total if total else 0.0

    def as_json(self) -> list[list[Any]]:
        """Rows [rank, action, start, end] for a file."""
        return [[s.rank, str(s.action), round(s.start, 7), round(s.end, 7)] for s in self.spans]

    @classmethod
    def from_json(cls, rows: Iterable[Any]) -> "Timeline":
        """The timeline that ``as_json`` wrote."""
        return cls(tuple(Span(r, parse_action(a), start, end) for r, a, start, end in rows))
