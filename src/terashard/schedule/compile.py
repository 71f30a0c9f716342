"""A schedule as one set of integer arrays, for judging only.

The actions of all ranks lie one after the other. Every need between them is an edge: ``action[e]``
needs ``need[e]``, both positions in the arrays. Needs of the table come from ``needs.needed`` on
whole columns, needs of parameters from the walk of ``residency.py``.

Shapes: A actions, E needs.
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np

from terashard.schedule.actions import KIND, PART, SEND, Action, Row
from terashard.schedule.needs import needed
from terashard.schedule.residency import residency
from terashard.schedule.schedule import Columns, Schedule


@dataclass(frozen=True, eq=False)
class Program:
    """All actions of a schedule as rows of integers, and all needs between them as pairs."""

    columns: Columns
    """[A, 6] rows of all ranks, rank after rank."""
    actions: tuple[Action, ...]
    """The same actions as values."""
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
        return self.actions[position]

    def place(self, position: int) -> str:
        """Where ``position`` is, as a reader would say it."""
        rank = int(self.rank[position])
        return f"rank {rank}, position {position - int(self.offsets[rank])}: {self.at(position)}"


def compile_schedule(schedule: Schedule) -> Program:
    """``schedule`` as arrays; ``ScheduleError`` if parameters are not there when they are read."""
    sizes = [len(program) for program in schedule.programs]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    columns = np.concatenate(schedule.programs)
    rank = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
    action, need, missing = _table_edges(schedule, columns, Index(columns))
    unit_edges = _unit_edges(schedule, offsets)
    return Program(
        columns,
        tuple(chain.from_iterable(schedule)),
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


def _unit_edges(schedule: Schedule, offsets: Columns) -> Columns:
    """[E, 2] edges of gathers, releases and reductions, from the walk over each rank's program."""
    edges = (
        np.array(list(residency(schedule, rank)), np.int64).reshape(-1, 2) + first
        for rank, first in enumerate(offsets[:-1].tolist())
    )
    return np.concatenate(list(edges))
