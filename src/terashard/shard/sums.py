"""Sums of gradients that are on their way: few at a time, and none blocking those behind it.

A sum over shards holds, until it is finished, what the other shards sent: about as much as the unit
itself. So it is finished, and its memory let go, when the sum of the unit after next is issued; by
then it has had the time of two units' backward to arrive. A sum over replicas needs the rows that
the sum over shards leaves. It is issued when that one is finished, not waited for where the
schedule asks for it::

    list      A5@shard  A5@replica  A4@shard  A4@replica  A3@shard            A3@replica  …
    issued    5@shard               4@shard               5@replica  3@shard              …
                                                          └ 5@shard is finished first

What is issued when follows from the list alone, and all ranks of a stage have the same list: so the
sums of one group are issued in one order everywhere. A tie joins two stages, whose lists differ. It
is issued where the list says, and finished at the end of the step.
"""

from collections import deque

from terashard.schedule.actions import Over
from terashard.shard.unit import ShardUnit

IN_FLIGHT = 2
"""Sums over one axis that may be on their way at a time."""


class Sums:
    """The sums of one step on one rank."""

    def __init__(self) -> None:
        self._flying: dict[Over, deque[ShardUnit]] = {"shard": deque(), "replica": deque()}
        self._asked: dict[str, list[Over]] = {}

    def reduce(self, unit: ShardUnit, over: Over) -> None:
        """Sum the gradients of ``unit`` over one axis, now or once an earlier sum is there."""
        if over == "tie":
            self.settle(unit)
            unit.reduce(over)
        elif over == "shard":
            self.settle(unit)  # of an earlier micro-batch
            self._issue(unit, over)
        elif any(unit in line for line in self._flying.values()):
            self._asked.setdefault(unit.name, []).append(over)
        else:
            self._issue(unit, over)

    def settle(self, unit: ShardUnit) -> None:
        """Finish the sums of ``unit``, and all that were issued before them."""
        for line in self._flying.values():
            while unit in line:
                self._finish(line.popleft())

    def _issue(self, unit: ShardUnit, over: Over) -> None:
        line = self._flying[over]
        if len(line) == IN_FLIGHT:
            self._finish(line.popleft())
        unit.reduce(over)
        if unit.is_reducing:  # one shard or one replica has nothing to wait for
            line.append(unit)

    def _finish(self, unit: ShardUnit) -> None:
        unit.wait_issued()
        asked = self._asked.get(unit.name)
        if asked:
            self._issue(unit, asked.pop(0))
