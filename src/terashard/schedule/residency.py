"""Follows one rank's parameters through its program: full or not, read, contributed to, summed.

A unit goes round as often as the program likes::

    sharded ── Gather ──> full ── F, B read it ──> read ── Release ──> sharded

and its gradient once: contributions, then its sums in their order. Where the sum over shards is
taken after every micro-batch, each takes up what has come since the one before.

The walk says what each action needs of the actions before it: a compute action the last ``Gather``
of every unit that it reads, a ``Release`` all readers since then, a ``Reduce`` the sum before it
and all contributions that it takes up. Where that is not there, it refuses.
"""

from collections.abc import Iterator
from typing import NoReturn, TypeAlias

from terashard.errors import ScheduleError
from terashard.schedule.actions import (
    Action,
    Backward,
    Cell,
    Forward,
    Gather,
    Receive,
    Reduce,
    Release,
    Send,
    UnitKey,
)
from terashard.schedule.needs import (
    reduction_of,
    reductions,
    reductions_before,
    units_fed,
    units_used,
)
from terashard.schedule.schedule import Schedule

Edge: TypeAlias = tuple[int, int]
"""Position of an action on its rank, and of one that it needs."""


def residency(schedule: Schedule, rank: int) -> Iterator[Edge]:
    """All needs of parameters on ``rank``; ``ScheduleError`` at the first that is not met."""
    if not schedule.units:
        return
    units = _Residency(schedule)
    for position, action in enumerate(schedule.actions(rank)):
        units.position, units.here = position, f"rank {rank}, position {position}: {action}"
        yield from ((position, need) for need in units.step(action))
    for unit in sorted(units.gathered):
        raise ScheduleError(f"rank {rank}: unit {unit} is gathered but never released")


class _Residency:
    """The state of the units of one rank, each with the positions that brought it about."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.gathered: dict[UnitKey, int] = {}
        self.readers: dict[UnitKey, list[int]] = {}
        self.feeders: dict[UnitKey, list[int]] = {}
        self.summed: dict[Reduce, int] = {}
        self.position, self.here = 0, ""

    def step(self, action: Action) -> Iterator[int]:
        """Take in one action; the positions of what it needs."""
        match action:
            case Gather(unit):
                self._gather(unit)
            case Release(unit):
                yield from self._release(unit)
            case Reduce():
                yield from self._reduce(action)
            case Forward(cell) | Backward(cell):
                yield from self._read(action, cell.stage)
                self._feed(action, cell)
            case Send() | Receive():
                pass

    def _gather(self, unit: UnitKey) -> None:
        if unit in self.gathered:
            self._refuse("gathers a unit that is full already")
        self.gathered[unit] = self.position

    def _release(self, unit: UnitKey) -> list[int]:
        if unit not in self.gathered:
            self._refuse("releases a unit that is not full")
        if unit not in self.readers:
            self._refuse("releases a unit that nothing has read since it was gathered")
        del self.gathered[unit]
        return self.readers.pop(unit)

    def _reduce(self, action: Reduce) -> Iterator[int]:
        if action not in reductions(self.schedule, action.unit):
            self._refuse(f"sums over {action.over}, which the unit's gradient does not go through")
        for before in reductions_before(self.schedule, action):
            if before not in self.summed:
                of = "" if before.micro is None else f" of micro-batch {before.micro}"
                first = f"the sum over {before.over}{of}"
                self._refuse(f"sums over {action.over} before {first} is done")
            yield self.summed[before]
        if action.over == "shard":
            yield from self.feeders.pop(action.unit, [])
            self.feeders[action.unit] = [self.position]  # the next takes up what comes from here
        self.summed[action] = self.position

    def _read(self, action: Action, stage: int) -> Iterator[int]:
        for unit in (UnitKey(stage, index) for index in units_used(self.schedule, action)):
            if unit not in self.gathered:
                self._refuse(f"reads unit {unit}, which is not gathered then")
            self.readers.setdefault(unit, []).append(self.position)
            yield self.gathered[unit]

    def _feed(self, action: Action, cell: Cell) -> None:
        for unit in (UnitKey(cell.stage, index) for index in units_fed(self.schedule, action)):
            if reduction_of(self.schedule, unit, cell) in self.summed:
                self._refuse(f"adds to the gradient of unit {unit} after it was reduced")
            self.feeders.setdefault(unit, []).append(self.position)

    def _refuse(self, why: str) -> NoReturn:
        raise ScheduleError(f"{self.here} {why}")
