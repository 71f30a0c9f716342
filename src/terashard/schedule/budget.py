r"""Which units are held when, if not all of them may be full at once.

The whole step is known, so the best choice is known too: when a unit must be gathered and the
budget is used up, let go of the one whose next use is furthest (Bélády, IBM Systems Journal 5,
1966). With unequal units, the furthest among those whose going suffices; if none does, the
furthest, and again.

A cell uses its units one after the other, forward from the first, backward from the last::

    uses        F0.0.0: u0 u1 u2 u3   F0.0.1: u0 u1 …   B0.0.1: u3 u2 …
    budget 3    ^ gather u0 u1 u2     here u3 is gathered in place of the one used furthest ahead

A unit is released right behind its last use before that, and the gather that its going makes room
for is issued there, not where it is waited for. So cells are cut into segments just there.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from terashard.errors import PlanError
from terashard.schedule.actions import Action, Backward, Cell, Forward, Gather, Release, UnitKey
from terashard.schedule.needs import units_used
from terashard.schedule.schedule import Schedule
from terashard.units import show_bytes

Place: TypeAlias = tuple[bool, Cell, int]
"""Whether in a forward cell, the cell, and the unit boundary at which it has arrived."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How many bytes of full parameters a rank may hold, and how many each unit has."""

    bytes_held: int
    sizes: Mapping[str, int]


@dataclass(slots=True)
class Moves:
    """Gathers and releases of all ranks, by the place behind which they come."""

    first: dict[int, list[Action]] = field(default_factory=dict)
    """By rank: what is gathered before anything runs."""
    behind: dict[Place, list[Action]] = field(default_factory=dict)

    def cuts(self, schedule: Schedule) -> dict[Cell, tuple[int, ...]]:
        """The unit boundaries at which cells must be cut: forward and backward alike."""
        found: dict[Cell, set[int]] = {}
        for _, cell, boundary in self.behind:
            if 0 < boundary < len(schedule.units[cell.stage]):
                found.setdefault(cell, set()).add(boundary)
        return {cell: tuple(sorted(bounds)) for cell, bounds in found.items()}


def plan_moves(schedule: Schedule, budget: Budget) -> Moves:
    """Gathers and releases for uncut cells; ``PlanError`` if one use alone is over the budget."""
    moves = Moves()
    for rank, program in enumerate(schedule):
        _Walk(schedule, budget, rank, moves).run(list(_uses(schedule, program)))
    return moves


@dataclass(frozen=True, slots=True)
class _Use:
    """What must be full together at one moment, and the place right behind it."""

    units: frozenset[UnitKey]
    behind: Place


def _uses(schedule: Schedule, program: Sequence[Action]) -> Iterator[_Use]:
    for action in program:
        if not isinstance(action, Forward | Backward):
            continue
        forward, cell = isinstance(action, Forward), action.cell
        used = set(units_used(schedule, action))
        units = schedule.units[cell.stage]
        places = {unit.name: index for index, unit in enumerate(units)}
        order = range(len(units)) if forward else range(len(units) - 1, -1, -1)
        for index in order:
            if index in used and (forward or not units[index].head):
                lent = {places[name] for name in units[index].borrows}
                together = frozenset(UnitKey(cell.stage, i) for i in {index, *lent})
                yield _Use(together, (forward, cell, index + 1 if forward else index))


class _Walk:
    """One rank's uses in order, and what is held."""

    def __init__(self, schedule: Schedule, budget: Budget, rank: int, moves: Moves) -> None:
        self._schedule, self._budget, self._moves = schedule, budget, moves
        self._first = moves.first.setdefault(rank, [])
        self._held: dict[UnitKey, int] = {}  # to the use that read it last
        self._room_since = -1  # the use behind which the newest room was made
        self._next: dict[UnitKey, list[int]] = {}

    def run(self, uses: Sequence[_Use]) -> None:
        """Decide everything."""
        for position, use in enumerate(uses):
            for unit in use.units:
                self._next.setdefault(unit, []).append(position)
        for position, use in enumerate(uses):
            self._require_room(use)
            for unit in sorted(use.units - self._held.keys()):
                self._make_room(unit, use, position, uses)
                self._put(Gather(unit), self._room_since, uses)
                self._held[unit] = position
            for unit in use.units:
                self._held[unit] = position
        for unit, last in sorted(self._held.items(), key=lambda pair: pair[1]):
            self._put(Release(unit), last, uses)

    def _make_room(self, unit: UnitKey, use: _Use, position: int, uses: Sequence[_Use]) -> None:
        while (lacking := self._size_of(*self._held, unit) - self._budget.bytes_held) > 0:
            may_go = [held for held in self._held if held not in use.units]
            enough = [held for held in may_go if self._size_of(held) >= lacking] or may_go
            gone = max(enough, key=lambda held: (self._next_use(held, position), held))
            last = self._held.pop(gone)
            self._put(Release(gone), last, uses)
            self._room_since = max(self._room_since, last)

    def _next_use(self, unit: UnitKey, position: int) -> int:
        uses = self._next[unit]
        place = bisect_right(uses, position)
        return uses[place] if place < len(uses) else 1 << 60

    def _put(self, action: Action, behind: int, uses: Sequence[_Use]) -> None:
        if behind < 0:
            self._first.append(action)
        else:
            self._moves.behind.setdefault(uses[behind].behind, []).append(action)

    def _size_of(self, *units: UnitKey) -> int:
        names = (self._schedule.units[unit.stage][unit.index].name for unit in units)
        return sum(self._budget.sizes[name] for name in names)

    def _require_room(self, use: _Use) -> None:
        wanted = self._size_of(*use.units)
        if wanted > self._budget.bytes_held:
            names = [self._schedule.units[u.stage][u.index].name for u in sorted(use.units)]
            raise PlanError(
                f"a residency of {show_bytes(self._budget.bytes_held)} cannot hold"
                f" {' and '.join(names)}, which take {show_bytes(wanted)} and are used at once;"
                " give at least that"
            )
