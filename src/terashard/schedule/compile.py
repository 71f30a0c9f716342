"""A schedule as one set of integer arrays, for judging only.

The actions of all ranks lie one after the other. Every need between them is an edge: ``action[e]``
needs ``need[e]``, both positions in the arrays. Needs of the table come from ``needs.needed`` on
whole columns. A compute action needs the last ``Gather`` of every unit that it reads, a ``Release``
all readers since then, a ``Reduce`` the sum before it or, if it is the first, all feeders.

Shapes: A actions, E needs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from terashard.schedule.actions import (
    GATHER,
    KIND,
    OVERS,
    PART,
    PEER,
    REDUCE,
    RELEASE,
    SEND,
    STAGE,
    Action,
    Row,
    decode,
)
from terashard.schedule.needs import needed, reduction_before, units_fed, units_used
from terashard.schedule.schedule import Columns, Schedule

Pair: TypeAlias = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Program:
    """All actions of a schedule as rows of integers, and all needs between them as pairs."""

    columns: Columns
    """[A, 6] rows of all ranks, rank after rank."""
    rank: Columns
    """[A] rank of every action."""
    offsets: Columns
    """[ranks + 1] where the actions of a rank begin; the last entry is A."""
    action: Columns
    """[E] position of the action that needs …"""
    need: Columns
    """[E] … this one."""
    missing: tuple[tuple[int, Row], ...]
    """Needs that no action meets: position of the action that needs, row of what it needs."""

    def __len__(self) -> int:
        return len(self.columns)

    def at(self, position: int) -> Action:
        """The action at ``position``."""
        return decode(tuple(self.columns[position].tolist()))

    def place(self, position: int) -> str:
        """Where ``position`` is, as a reader would say it."""
        rank = int(self.rank[position])
        return f"rank {rank}, position {position - int(self.offsets[rank])}: {self.at(position)}"


def compile_schedule(schedule: Schedule) -> Program:
    """``schedule`` as arrays, its needs filled in from ``needs.py``."""
    sizes = [len(program) for program in schedule.programs]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    columns = np.concatenate(schedule.programs) if sum(sizes) else np.zeros((0, 6), np.int64)
    rank = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
    index = Index(columns)
    action, need, missing = _table_edges(schedule, columns, index)
    unit_edges = np.array(list(_unit_edges(schedule, columns, rank)), np.int64).reshape(-1, 2)
    return Program(
        columns,
        rank,
        offsets,
        np.concatenate([action, unit_edges[:, 0]]),
        np.concatenate([need, unit_edges[:, 1]]),
        missing,
    )


class Index:
    """Finds actions that happen once by their columns."""

    def __init__(self, columns: Columns) -> None:
        self._extents = columns.max(axis=0, initial=0) + 2
        self._keys = self.keys(columns)
        self._sorted = np.argsort(self._keys, kind="stable")

    def keys(self, columns: Columns) -> Columns:
        """One integer per action; a send is the same action paired or not."""
        digits = columns + 1
        digits[:, PART] = np.where(columns[:, KIND] == SEND, 0, digits[:, PART])
        key = np.zeros(len(columns), np.int64)
        for column, extent in enumerate(self._extents.tolist()):
            digit = digits[:, column]
            foreign = (digit < 0) | (digit > extent)
            key = key * (extent + 1) + np.where(foreign, extent, digit)
        return key

    def find(self, columns: Columns) -> Columns:
        """Positions of ``columns``, -1 where there is no such action."""
        if not len(self._keys):
            return np.full(len(columns), -1, np.int64)
        wanted = self.keys(columns)
        place = np.searchsorted(self._keys, wanted, sorter=self._sorted)
        position = self._sorted[np.minimum(place, len(self._keys) - 1)]
        return np.where(self._keys[position] == wanted, position, -1)


def _table_edges(
    schedule: Schedule, columns: Columns, index: Index
) -> tuple[Columns, Columns, tuple[tuple[int, Row], ...]]:
    actions, needs = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    missing: list[tuple[int, Row]] = []
    for at, target in needed(schedule, columns):
        found = index.find(target)
        absent = found < 0
        missing += zip(at[absent].tolist(), map(tuple, target[absent].tolist()), strict=True)
        actions.append(at[~absent])
        needs.append(found[~absent])
    return np.concatenate(actions), np.concatenate(needs), tuple(missing)


def _unit_edges(schedule: Schedule, columns: Columns, rank: Columns) -> Iterator[Pair]:
    """Edges of gathers, releases and reductions, in one walk over the program of each rank."""
    if not schedule.units:
        return
    for each in range(schedule.grid.ranks):
        yield from _Walk(schedule, columns, np.flatnonzero(rank == each)).edges()


class _Walk:
    """One rank's program, first action to last, and who gathered, used and fed each unit so far."""

    def __init__(self, schedule: Schedule, columns: Columns, positions: NDArray[np.int64]) -> None:
        self.schedule, self.columns, self.positions = schedule, columns, positions
        self.gathered: dict[Pair, int] = {}
        self.used: dict[Pair, list[int]] = {}
        self.fed: dict[Pair, list[int]] = {}
        self.reduced: dict[tuple[Pair, int], int] = {}

    def edges(self) -> Iterator[Pair]:
        """(action, needed action) pairs."""
        for position in self.positions.tolist():
            kind = int(self.columns[position, KIND])
            unit = (int(self.columns[position, STAGE]), int(self.columns[position, PART]))
            if kind == GATHER:
                self.gathered[unit] = position
            elif kind == RELEASE:
                yield from ((position, user) for user in self.used.pop(unit, ()))
            elif kind == REDUCE:
                yield from self._reduce(position, unit)
            else:
                yield from self._compute(position)

    def _reduce(self, position: int, unit: Pair) -> Iterator[Pair]:
        over = int(self.columns[position, PEER])
        reductions = self.schedule.units[unit[0]][unit[1]].reductions
        before = reduction_before(OVERS[over], reductions) if OVERS[over] in reductions else None
        if before is None:
            yield from ((position, feeder) for feeder in self.fed.get(unit, ()))
        elif (done := self.reduced.get((unit, OVERS.index(before)))) is not None:
            yield position, done
        self.reduced[unit, over] = position

    def _compute(self, position: int) -> Iterator[Pair]:
        action = decode(tuple(self.columns[position].tolist()))
        stage = int(self.columns[position, STAGE])
        for index in units_used(self.schedule, action):
            self.used.setdefault((stage, index), []).append(position)
            if (gather := self.gathered.get((stage, index))) is not None:
                yield position, gather
        for index in units_fed(self.schedule, action):
            self.fed.setdefault((stage, index), []).append(position)
