"""A schedule: what every pipeline rank does, in order, with the units and segments it speaks of.

All shards and replicas of a stage run the same list, so there is one list per pipeline rank.
Written as text::

    terashard schedule 1
    ranks 2
    chunks 1 looped
    micro 1 [2, 2]                   one line per micro-batch: sequences, slice lengths
    unit 0:0 embed shard             one line per unit once sharding is in the list: reductions it
    takes part in
    unit 1:1 head shard head         … `head`: used with the loss, in forward cells only
    cut 0.0.0 1                      units at which a cell is cut into segments
    rank 0: G0:0 F0.0.0 S0.0.0>1 …
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from terashard.errors import ScheduleError
from terashard.schedule.actions import (
    OVERS,
    Action,
    Cell,
    Grid,
    MicroBatch,
    Over,
    decode,
    encode,
    parse_action,
)

Columns: TypeAlias = NDArray[np.int64]

HEADER = "terashard schedule 1"


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of a stage as the schedule sees it: its name, the sums its gradient goes through, and whether it is a head.

    A head is used together with the loss: its parameters are needed, and its gradient is made, in
    forward cells only.
    """

    name: str
    reductions: tuple[Over, ...] = ("shard",)
    head: bool = False


@dataclass(frozen=True, eq=False)
class Schedule:
    """``programs[r]`` [actions, 6]: the actions of pipeline rank ``r`` as integer columns.

    ``units[s]`` lists the units of stage ``s`` (empty until sharding is put in), ``cuts`` the
    unit boundaries at which a
    cell is cut into segments; ``training`` is false for a list of forward cells only.
    """

    grid: Grid
    programs: tuple[Columns, ...]
    units: tuple[tuple[Unit, ...], ...] = ()
    cuts: Mapping[Cell, tuple[int, ...]] = field(default_factory=dict)
    training: bool = True

    @classmethod
    def of(cls, grid: Grid, actions: Sequence[Iterable[Action]], **rest: Any) -> "Schedule":
        """A schedule from the actions of every rank."""
        rows = ([encode(action) for action in program] for program in actions)
        columns = tuple(np.array(r, np.int64).reshape(-1, 6) for r in rows)
        return cls(grid, columns, **rest)

    def with_actions(self, actions: Sequence[Iterable[Action]], **changes: Any) -> "Schedule":
        """The same schedule with other actions, and other units or cuts if given."""
        kept = {"units": self.units, "cuts": self.cuts, "training": self.training}
        return Schedule.of(self.grid, actions, **(kept | changes))

    def actions(self, rank: int) -> Iterator[Action]:
        """What ``rank`` does, in order."""
        return (decode(tuple(row)) for row in self.programs[rank].tolist())

    def __iter__(self) -> Iterator[list[Action]]:
        return (list(self.actions(rank)) for rank in range(self.grid.ranks))

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
        """The schedule as text that ``parse`` reads back."""
        grid = self.grid
        lines = [HEADER, f"ranks {grid.ranks}", f"chunks {grid.chunks} {grid.placement}"]
        lines += [] if self.training else ["forward only"]
        lines += [f"micro {m.sequences} {list(m.slices)}" for m in grid.partition]
        for stage, units in enumerate(self.units):
            for index, unit in enumerate(units):
                words = [
                    "unit",
                    f"{stage}:{index}",
                    unit.name,
                    *unit.reductions,
                    *["head"] * unit.head,
                ]
                lines.append(" ".join(words))
        for cell, bounds in sorted(self.cuts.items()):
            lines.append(f"cut {cell} {' '.join(map(str, bounds))}")
        lines += [f"rank {r}: {' '.join(map(str, actions))}" for r, actions in enumerate(self)]
        return "\n".join(lines) + "\n"


class _Reader:
    """Collects the lines of a schedule's text."""

    def __init__(self) -> None:
        self.ranks, self.chunks, self.placement, self.training = 0, 1, "looped", True
        self.micros: list[MicroBatch] = []
        self.units: dict[int, list[Unit]] = {}
        self.cuts: dict[Cell, tuple[int, ...]] = {}
        self.programs: dict[int, list[Action]] = {}

    def read(self, line: str) -> None:
        """Take in one line."""
        word, _, rest = line.partition(" ")
        reader = getattr(self, f"_{word}", None)
        if reader is None:
            raise ValueError(f"unknown word {word!r}")
        reader(rest)

    def _ranks(self, rest: str) -> None:
        self.ranks = int(rest)

    def _chunks(self, rest: str) -> None:
        chunks, self.placement = rest.split()
        self.chunks = int(chunks)

    def _forward(self, rest: str) -> None:
        self.training = False

    def _micro(self, rest: str) -> None:
        sequences, _, lengths = rest.partition(" ")
        self.micros.append(
            MicroBatch(int(sequences), tuple(int(n) for n in lengths.strip("[] ").split(",")))
        )

    def _unit(self, rest: str) -> None:
        place, name, *words = rest.split()
        stage, index = map(int, place.split(":"))
        units = self.units.setdefault(stage, [])
        if index != len(units):
            raise ValueError(f"unit {place} is out of order")
        overs = tuple(over for over in OVERS if over in words)
        units.append(Unit(name, overs, head="head" in words))

    def _cut(self, rest: str) -> None:
        cell, *bounds = rest.split()
        self.cuts[Cell(*map(int, cell.split(".")))] = tuple(map(int, bounds))

    def _rank(self, rest: str) -> None:
        rank, _, actions = rest.partition(":")
        self.programs[int(rank)] = [parse_action(word) for word in actions.split()]

    def schedule(self) -> Schedule:
        """What was read, as a schedule."""
        grid = Grid(
            ranks=self.ranks,
            partition=tuple(self.micros),
            chunks=self.chunks,
            placement="v" if self.placement == "v" else "looped",
        )
        programs = [self.programs.get(rank, []) for rank in range(grid.ranks)]
        units = (
            tuple(tuple(self.units.get(s, ())) for s in range(grid.num_stages))
            if self.units
            else ()
        )
        return Schedule.of(grid, programs, units=units, cuts=self.cuts, training=self.training)


def parse(text: str) -> Schedule:
    """Read a schedule from its text; ``ScheduleError`` names the line that is wrong."""
    lines = text.splitlines()
    if not lines or lines[0].strip() != HEADER:
        raise ScheduleError(f"this is no schedule: its first line must be {HEADER!r}")
    reader = _Reader()
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            reader.read(line.strip())
        except (ValueError, TypeError) as cause:
            raise ScheduleError(
                f"line {number} of the schedule, {line.strip()[:60]!r}: {cause}"
            ) from cause
    return reader.schedule()
