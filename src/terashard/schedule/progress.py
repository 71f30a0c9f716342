"""Does every rank come to the end? All programs are walked together, each as far as it can go.

A rank *issues* its next action and goes on when that is *done*:

- a buffered send at once, a blocking one when the other rank has issued the matching receive (a
  paired send and the receive behind it are then issued together);
- a receive when the matching send is issued;
- a sum over a tie when the other rank has issued its own;
- anything else at once: what it needs stands before it on its own rank.

Issuing never takes anything away from another rank, so if any order of events ends, this one does.
"""

from typing import Literal, TypeAlias

from terashard.errors import ScheduleError
from terashard.schedule.actions import Receive, Reduce, Send
from terashard.schedule.compile import Program

Sends: TypeAlias = Literal["buffered", "blocking"]


def check_ends(program: Program, sends: Sends) -> None:
    """Refuse a program that stops for ever, and say who waits for what."""
    walk = _Progress(program, sends)
    while walk.advance():
        pass
    stuck = [walk.waiting(rank) for rank in range(walk.ranks) if not walk.ended(rank)]
    if stuck:
        raise ScheduleError(f"with {sends} sends this schedule never ends: {'; '.join(stuck)}")


class _Progress:
    """What every rank has issued, and what is done."""

    def __init__(self, program: Program, sends: Sends) -> None:
        self.program, self.blocking = program, sends == "blocking"
        self.offsets = program.offsets.tolist()
        self.ranks = len(self.offsets) - 1
        self.pointer = self.offsets[:-1].copy()
        self.issued, self.num_issued = bytearray(len(program)), 0
        self.actions = program.actions
        self.partner = self._partners()

    def _partners(self) -> dict[int, int]:
        """The other side of every message and of the tie."""
        across = self.program.rank[self.program.action] != self.program.rank[self.program.need]
        receives = self.program.action[across].tolist()
        sends = self.program.need[across].tolist()
        ties = [i for i, a in enumerate(self.actions) if isinstance(a, Reduce) and a.over == "tie"]
        sides = [*receives, *sends, *ties], [*sends, *receives, *reversed(ties)]
        return dict(zip(*sides, strict=True))

    def ended(self, rank: int) -> bool:
        """Whether ``rank`` has done everything."""
        return bool(self.pointer[rank] == self.offsets[rank + 1])

    def advance(self) -> bool:
        """Let every rank go on as far as it can; whether any issued something new."""
        before = self.num_issued
        for rank in range(self.ranks):
            self._advance(rank)
        return self.num_issued > before

    def _advance(self, rank: int) -> None:
        while not self.ended(rank):
            together = self._issue(rank)
            if not all(map(self._is_done, together)):
                break
            self.pointer[rank] = together.stop

    def _issue(self, rank: int) -> range:
        first = self.pointer[rank]
        action = self.actions[first]
        paired = self.blocking and isinstance(action, Send) and action.paired
        together = range(first, first + 1 + paired)
        for position in together:
            self.num_issued += not self.issued[position]
            self.issued[position] = True
        return together

    def _is_done(self, position: int) -> bool:
        """Whether an action that its rank has issued is done."""
        match self.actions[position]:
            case Send() if not self.blocking:
                return True
            case Send() | Receive() | Reduce(over="tie"):
                return bool(self.issued[self.partner[position]])
            case _:
                return True

    def waiting(self, rank: int) -> str:
        """What ``rank`` waits for, as a clause."""
        position = next(p for p in self._issue(rank) if not self._is_done(p))
        other = self.program.at(self.partner[position])
        return f"{self.program.place(position)} waits for {other}"
