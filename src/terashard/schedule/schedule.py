"""A schedule: what every pipeline rank does, in order, with the units and segments it speaks of.

All shards and replicas of a stage run the same list, so there is one list per pipeline rank. It is
kept as integer columns, one row per action, and yields the actions when it is iterated.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from terashard.errors import ScheduleError
from terashard.schedule.actions import OVERS, Action, Cell, Grid, Over, decode, encode

Columns: TypeAlias = NDArray[np.int64]

HEADER = "terashard schedule 1"
"""First line of a schedule's text."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of a stage: its name, the sums its gradient goes through, whether it is a head.

    A head is used together with the loss: its parameters are needed, and its gradient is made, in
    forward cells only. A unit without sums is frozen: it has no gradient. ``borrows`` names earlier
    units of the same stage whose parameters this one uses as well (a head with the embedding's
    weight): they are needed, and contributed to, whenever this one is. With ``each_micro`` the sum
    over shards is taken after every micro-batch, not once per step.
    """

    name: str
    reductions: tuple[Over, ...] = ("shard",)
    head: bool = False
    borrows: tuple[str, ...] = ()
    each_micro: bool = False

    def __post_init__(self) -> None:
        """Refuse a name that is no word, and sums that cannot be taken in their order."""
        if not self.name or any(letter.isspace() for letter in self.name):
            raise ScheduleError(f"a unit is named {self.name!r}; a name is one word without spaces")
        in_order = tuple(over for over in OVERS if over in self.reductions)
        if self.reductions != in_order or (in_order and in_order[0] != "shard"):
            raise ScheduleError(
                f"unit {self.name} is summed over {', '.join(self.reductions)}; the order is"
                f" {', '.join(OVERS)}, each at most once, and it starts with shard"
            )

    def words(self) -> list[str]:
        """The unit as words of text."""
        lent = ["borrows", *self.borrows] if self.borrows else []
        marks = [*["each"] * self.each_micro, *["head"] * self.head]
        return [self.name, *self.reductions, *marks, *lent]


class Shape:
    """Sizes of a schedule's grid and cells as arrays."""

    def __init__(self, grid: Grid, cuts: Mapping[Cell, tuple[int, ...]]) -> None:
        self.slices = np.array(grid.num_slices, np.int64)
        self.rank_of = np.array([grid.rank_of(s) for s in range(grid.num_stages)], np.int64)
        extents = (grid.num_stages, grid.num_micros, int(self.slices.max()))
        self.segments = np.ones(extents, np.int64)
        for cell, bounds in cuts.items():
            self.segments[cell.stage, cell.micro, cell.slice] = len(bounds) + 1


@dataclass(frozen=True, eq=False)
class Schedule:
    """``programs[r]`` [actions, 6]: what rank ``r`` does, as read-only rows of integers.

    ``units[s]`` lists the units of stage ``s`` (empty until sharding is put in), ``cuts`` the unit
    boundaries at which a cell is cut into segments; ``training`` is false for a list of forward
    cells only.
    """

    grid: Grid
    programs: tuple[Columns, ...]
    units: tuple[tuple[Unit, ...], ...] = ()
    cuts: Mapping[Cell, tuple[int, ...]] = field(default_factory=dict)
    training: bool = True

    def __post_init__(self) -> None:
        """Refuse programs, units or cuts that are not those of the grid."""
        object.__setattr__(self, "programs", tuple(map(_read_only, self.programs)))
        if len(self.programs) != self.grid.ranks:
            raise ScheduleError(
                f"there are programs for {len(self.programs)} ranks, but the grid has"
                f" {self.grid.ranks}; every rank needs one"
            )
        if self.units and len(self.units) != self.grid.num_stages:
            raise ScheduleError(
                f"units are listed for {len(self.units)} stages, but the grid has"
                f" {self.grid.num_stages}; list those of every stage, or none"
            )
        for stage, units in enumerate(self.units):
            if any(unit.head for unit in units[:-1]) or (
                units and units[-1].head and stage != self.grid.num_stages - 1
            ):
                raise ScheduleError(
                    f"stage {stage} has a head among its units; only the last unit of the last"
                    " stage can be one"
                )
            self._require_loans(stage, units)
        for cell, bounds in self.cuts.items():
            self._require_cut(cell, bounds)

    def _require_loans(self, stage: int, units: Sequence[Unit]) -> None:
        earlier: set[str] = set()
        for unit in units:
            for lender in unit.borrows:
                if lender not in earlier:
                    raise ScheduleError(
                        f"unit {unit.name} of stage {stage} borrows from {lender}; a unit borrows"
                        f" from earlier ones of its stage: {', '.join(sorted(earlier)) or 'none'}"
                    )
            earlier.add(unit.name)

    def _require_cut(self, cell: Cell, bounds: tuple[int, ...]) -> None:
        if cell not in self.grid:
            raise ScheduleError(f"cell {cell} is cut into segments, but the grid has no such cell")
        units = len(self.units[cell.stage]) if self.units else None
        ends = (0, *bounds) if units is None else (0, *bounds, units)
        if not bounds or any(after <= before for before, after in pairwise(ends)):
            stage = "" if units is None else f" of the stage's {units}"
            raise ScheduleError(
                f"cell {cell} is cut at units {list(bounds)}{stage}; cuts must rise, and leave at"
                " least one unit in every segment"
            )

    @classmethod
    def of(cls, grid: Grid, actions: Sequence[Iterable[Action]], **rest: Any) -> "Schedule":
        """A schedule from the actions of every rank; ``rest``: units, cuts, training."""
        rows = ([encode(action) for action in program] for program in actions)
        columns = tuple(np.array(r, np.int64).reshape(-1, 6) for r in rows)
        return cls(grid, columns, **rest)

    def with_actions(self, actions: Sequence[Iterable[Action]], **changes: Any) -> "Schedule":
        """The same schedule with other actions, and other units or cuts if given."""
        kept = {"units": self.units, "cuts": self.cuts, "training": self.training}
        return Schedule.of(self.grid, actions, **(kept | changes))

    @cached_property
    def shape(self) -> Shape:
        """Sizes of the grid and its cells, as arrays."""
        return Shape(self.grid, self.cuts)

    @cached_property
    def _decoded(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of every rank; rows are decoded once."""
        return tuple(tuple(decode(tuple(row)) for row in p.tolist()) for p in self.programs)

    def actions(self, rank: int) -> Iterator[Action]:
        """What ``rank`` does, in order."""
        return iter(self._decoded[rank])

    def __iter__(self) -> Iterator[list[Action]]:
        return map(list, self._decoded)

    def __len__(self) -> int:
        return sum(len(program) for program in self.programs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.text() == other.text()

    def __hash__(self) -> int:
        return hash(self.text())

    def segments(self, cell: Cell) -> int:
        """How many segments ``cell`` is cut into."""
        return len(self.cuts.get(cell, ())) + 1

    def text(self) -> str:
        """The schedule as text that ``text.parse`` reads back; the form is described there."""
        grid = self.grid
        lines = [HEADER, f"ranks {grid.ranks}", f"chunks {grid.chunks} {grid.placement}"]
        lines += [] if self.training else ["forward only"]
        lines += [f"micro {m.sequences} {list(m.slices)}" for m in grid.partition]
        for stage, units in enumerate(self.units):
            for index, unit in enumerate(units):
                lines.append(f"unit {stage}:{index} {' '.join(unit.words())}")
        for cell, bounds in sorted(self.cuts.items()):
            lines.append(f"cut {cell} {' '.join(map(str, bounds))}")
        lines += [f"rank {r}: {' '.join(map(str, actions))}" for r, actions in enumerate(self)]
        return "\n".join(lines) + "\n"


def _read_only(program: Columns) -> Columns:
    """``program`` itself if nobody can write it, or a copy."""
    if program.flags.writeable:
        program = program.copy()
        program.setflags(write=False)
    return program
