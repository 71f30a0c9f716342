"""A schedule as a picture for the terminal: one lane per rank, time from left to right.

    step    0    5    10   15
    rank 0  F0 F1 F2 F3 ·  ·  B3 B2 B1 B0
    rank 1  ·  F0 F1 F2 F3 B3 B2 B1 B0 ·

The picture is of an ideal machine: a forward takes as many steps as its cell has tokens, counted in
those of the smallest cell, a backward ``Scale.backward`` times as many, everything else no time,
and every action starts as soon as its rank is free and what it needs is done. What machines really
do is another matter; this shows the order.

``print(picture)`` is plain text; ``rich`` prints the same in colour, one colour per micro-batch.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, TypeAlias

from terashard.schedule.actions import Action, Backward, Cell, Forward, Grid
from terashard.schedule.check import check
from terashard.schedule.compile import Program
from terashard.schedule.schedule import Schedule

if TYPE_CHECKING:
    from rich.text import Text

Piece: TypeAlias = tuple[str, str]
"""Characters, and the style that rich gives them."""

_COLOURS = (
    ("#a5d8ff", "#1971c2"),
    ("#ffd8a8", "#d9480f"),
    ("#b2f2bb", "#2b8a3e"),
    ("#eebefa", "#9c36b5"),
    ("#ffec99", "#a66d00"),
    ("#99e9f2", "#0c8599"),
)
"""Of each micro-batch in turn: behind forward cells, behind backward cells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large a picture is; with the same ``work`` and ``letters``, two can be compared."""

    width: int = 100
    """Letters in a line; what is wider is cut off, with a note."""
    backward: int = 1
    """Steps of a backward cell where the forward takes one."""
    work: int | None = None
    """Sequences x tokens of one step; by default those of the smallest cell."""
    letters: int | None = None
    """Letters of one step; by default as many as the labels need and the width allows."""


@dataclass(frozen=True, slots=True)
class Box:
    """A cell on the time axis, from ``start`` to ``end`` steps."""

    cell: Cell
    forward: bool
    start: Fraction
    end: Fraction

    def continues_in(self, other: "Box") -> bool:
        """Whether ``other`` goes on with the same cell where this one ends."""
        return (self.cell, self.forward, self.end) == (other.cell, other.forward, other.start)


@dataclass(frozen=True)
class Picture:
    """A drawn schedule: text by ``str``, in colour by ``rich``."""

    lanes: tuple[tuple[Box, ...], ...]
    """What every rank computes, in order."""
    rows: tuple[tuple[Piece, ...], ...]
    """Lines of the drawing."""

    @property
    def steps(self) -> float:
        """Length of the schedule."""
        return float(max(box.end for lane in self.lanes for box in lane))

    @property
    def busy(self) -> float:
        """Part of all ranks' time in which they compute."""
        work = sum(box.end - box.start for lane in self.lanes for box in lane)
        return float(work) / (self.steps * len(self.lanes))

    def __str__(self) -> str:
        return "\n".join("".join(text for text, _ in row).rstrip() for row in self.rows)

    def __rich__(self) -> "Text":
        """The same in colour."""
        from rich.text import Text

        lines = [Text.assemble(*row) for row in self.rows]
        for line in lines:
            line.rstrip()
        return Text("\n", no_wrap=True, overflow="crop").join(lines)


def draw(schedule: Schedule, scale: Scale | None = None) -> Picture:
    """Draw a schedule that ``check`` accepts."""
    scale = scale or Scale()
    lanes = _lanes(schedule, check(schedule), scale)
    canvas = _Canvas(schedule.grid, lanes, scale)
    rows = [canvas.axis(), *(canvas.lane(rank, lane) for rank, lane in enumerate(lanes))]
    return Picture(lanes, tuple(map(tuple, [*rows, *canvas.notes()])))


def _lanes(schedule: Schedule, program: Program, scale: Scale) -> tuple[tuple[Box, ...], ...]:
    duration = [_duration(schedule, action, scale) for action in program.actions]
    lanes: list[list[Box]] = [[] for _ in range(schedule.grid.ranks)]
    for position, end in enumerate(_ends(program, duration)):
        action, lane = program.at(position), lanes[int(program.rank[position])]
        if not isinstance(action, Forward | Backward):
            continue
        start, forward = end - duration[position], isinstance(action, Forward)
        box = Box(action.cell, forward, start, end)
        # Segments of one cell that follow each other are one box.
        if lane and lane[-1].continues_in(box):
            box = replace(box, start=lane.pop().start)
        lane.append(box)
    return tuple(map(tuple, lanes))


def _duration(schedule: Schedule, action: Action, scale: Scale) -> Fraction:
    """Steps of ``action``."""
    if not isinstance(action, Forward | Backward):
        return Fraction(0)
    partition, cell = schedule.grid.partition, action.cell
    one = scale.work or min(micro.sequences * min(micro.slices) for micro in partition)
    work = partition[cell.micro].sequences * partition[cell.micro].slices[cell.slice]
    times = scale.backward if isinstance(action, Backward) else 1
    return Fraction(work * times, one * schedule.segments(cell))


def _ends(program: Program, duration: Sequence[Fraction]) -> list[Fraction]:
    """Earliest end of every action: it starts after the one before it, and after its needs."""
    needs: list[list[int]] = [[] for _ in range(len(program))]
    for action, need in zip(program.action.tolist(), program.need.tolist(), strict=True):
        needs[action].append(need)
    end: dict[int, Fraction] = {}
    at, stops = program.offsets[:-1].tolist(), program.offsets[1:].tolist()
    free = [Fraction(0)] * len(at)
    while at != stops:
        for rank, stop in enumerate(stops):
            while at[rank] < stop and all(need in end for need in needs[at[rank]]):
                ready = max([free[rank], *(end[need] for need in needs[at[rank]])])
                free[rank] = end[at[rank]] = ready + duration[at[rank]]
                at[rank] += 1
    return [end[position] for position in range(len(program))]


class _Canvas:
    """Turns steps into letters."""

    def __init__(self, grid: Grid, lanes: Iterable[Iterable[Box]], scale: Scale) -> None:
        boxes = [box for lane in lanes for box in lane]
        self.steps = max(box.end for box in boxes)
        self.margin = len(f"rank {grid.ranks - 1}  ")
        smallest = min(box.end - box.start for box in boxes)
        smallest = smallest if scale.letters is None else min(Fraction(1), smallest)
        room = scale.width - self.margin
        for self.label, length in _labels(grid):
            self.letters = scale.letters or ceil((length + 1) / smallest)
            if length < smallest * self.letters and self.steps * self.letters <= room + 1:
                break
        self.shown = min(self.steps, Fraction(max(1, (room + 1) // self.letters)))
        self.grid = grid

    def axis(self) -> Iterator[Piece]:
        """The numbers of steps."""
        yield "step".ljust(self.margin), "dim"
        every = 5 if self.letters < 10 else 1
        last = ceil(self.shown)
        for step in range(0, last, every):
            yield str(step).ljust(min(every, last - step) * self.letters), "dim"

    def lane(self, rank: int, boxes: Iterable[Box]) -> Iterator[Piece]:
        """One rank: its cells, and dots for the steps between."""
        yield f"rank {rank}".ljust(self.margin), "bold"
        now = Fraction(0)
        for box in boxes:
            if box.start >= self.shown:
                break
            yield from self._idle(now, box.start)
            yield from self._cell(box)
            now = box.end
        yield from self._idle(now, self.shown)

    def notes(self) -> Iterator[list[Piece]]:
        """What a reader must be told."""
        if self.shown < self.steps:
            text = (
                f"… {self.shown} of {float(self.steps):g} steps; a wider one (--width) shows more"
            )
            yield [(text, "dim")]

    def _at(self, step: Fraction) -> int:
        return int(min(step, self.shown) * self.letters + Fraction(1, 2))

    def _idle(self, start: Fraction, end: Fraction) -> Iterator[Piece]:
        dots = (
            "·" if x % self.letters == 0 else " " for x in range(self._at(start), self._at(end))
        )
        yield "".join(dots), "dim"

    def _cell(self, box: Box) -> Iterator[Piece]:
        width = self._at(box.end) - self._at(box.start)
        text = ("F" if box.forward else "B") + self.label(box.cell)
        light, dark = _COLOURS[box.cell.micro % len(_COLOURS)]
        style = f"black on {light}" if box.forward else f"bold white on {dark}"
        yield text[: width - 1].ljust(width - 1, "─"), style
        yield " ", ""


def _labels(grid: Grid) -> Iterator[tuple[Callable[[Cell], str], int]]:
    """Ways to write a cell on its rank, the clearest first, each with its length behind F or B."""
    micro, index = len(str(grid.num_micros - 1)), len(str(max(grid.num_slices) - 1))
    if grid.chunks > 1:
        yield str, len(str(grid.num_stages - 1)) + micro + index + 3
        return
    yield (lambda cell: f"{cell.micro}.{cell.slice}"), micro + index + 2
    if grid.num_micros == 1:
        yield (lambda cell: f"{cell.slice}"), index + 1
    elif max(grid.num_slices) == 1:
        yield (lambda cell: f"{cell.micro}"), micro + 1
    elif micro == index == 1:
        yield (lambda cell: f"{cell.micro}{cell.slice}"), 3
