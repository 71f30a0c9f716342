"""Follows one rank's parameters through its program: full or not, read, contributed to, summed.

A unit goes round as often as the program likes::

    sharded ── Gather ──> full ── F, B read it ──> read ── Release ──> sharded

and its gradient once: contributions, then its sums in their order.
"""

from collections.abc import Sequence
from typing import NoReturn

from terashard.errors import ScheduleError
from terashard.schedule.actions import (
    Action,
    Backward,
    Forward,
    Gather,
    Over,
    Receive,
    Reduce,
    Release,
    Send,
    UnitKey,
)
from terashard.schedule.needs import reduction_before, units_fed, units_used
from terashard.schedule.schedule import Schedule


def check_residency(schedule: Schedule, rank: int, actions: Sequence[Action]) -> None:
    """Refuse at the first action of ``rank`` that finds its units in the wrong state."""
    if not schedule.units:
        return
    units = _Residency(schedule)
    for position, action in enumerate(actions):
        units.here = f"rank {rank}, position {position}: {action}"
        units.step(action)
    for unit in sorted(units.full):
        raise ScheduleError(f"rank {rank}: unit {unit} is gathered but never released")


class _Residency:
    """The state of the units of one rank."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.full: set[UnitKey] = set()
        self.read: set[UnitKey] = set()
        self.summed: dict[UnitKey, set[Over]] = {}
        self.here = ""

    def step(self, action: Action) -> None:
        """Take in one action."""
        match action:
            case Gather(unit):
                self._gather(unit)
            case Release(unit):
                self._release(unit)
            case Reduce(unit, over):
                self._reduce(unit, over)
            case Forward(cell) | Backward(cell):
                self._compute(action, cell.stage)
            case Send() | Receive():
                pass

    def _gather(self, unit: UnitKey) -> None:
        if unit in self.full:
            self._refuse("gathers a unit that is full already")
        self.full.add(unit)

    def _release(self, unit: UnitKey) -> None:
        if unit not in self.full:
            self._refuse("releases a unit that is not full")
        if unit not in self.read:
            self._refuse("releases a unit that nothing has read since it was gathered")
        self.full.remove(unit)
        self.read.remove(unit)

    def _reduce(self, unit: UnitKey, over: Over) -> None:
        reductions = self.schedule.units[unit.stage][unit.index].reductions
        before, done = reduction_before(over, reductions), self.summed.setdefault(unit, set())
        if before is not None and before not in done:
            self._refuse(f"sums over {over} before the sum over {before} is done")
        done.add(over)

    def _compute(self, action: Action, stage: int) -> None:
        for index in units_used(self.schedule, action):
            if UnitKey(stage, index) not in self.full:
                self._refuse(f"reads unit {stage}:{index}, which is not gathered then")
            self.read.add(UnitKey(stage, index))
        for index in units_fed(self.schedule, action):
            if UnitKey(stage, index) in self.summed:
                self._refuse(f"adds to the gradient of unit {stage}:{index} after it was reduced")

    def _refuse(self, why: str) -> NoReturn:
        raise ScheduleError(f"{self.here} {why}")
