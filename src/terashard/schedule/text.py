"""Schedules from text: what ``Schedule.text`` writes, read back.

One line per fact; empty lines and lines that begin with ``#`` are skipped::

    terashard schedule 1
    ranks 2                     pipeline ranks
    chunks 1 looped             stages on each rank, and how they are placed
    forward only                only in a schedule without backward cells
    micro 1 [2, 2]              one line per micro-batch: sequences, slice lengths
    unit 0:0 embed shard        one line per unit, once sharding is in: name, sums of its gradient
    unit 1:1 head shard head    … and `head` if it is used with the loss, in forward cells only
    unit 0:2 out shard borrows embed    … and whose parameters of the same stage it uses as well
    unit 0:3 in shard each      … and `each` if it is summed over shards after every micro-batch
    cut 0.0.0 1                 the units at which a cell is cut into segments
    rank 0: G0:0 F0.0.0 S0.0.0>1 …
"""

import re
from typing import cast

from terashard.errors import PlanError, ScheduleError
from terashard.schedule.actions import (
    OVERS,
    Action,
    Backward,
    Cell,
    Forward,
    Gather,
    Grid,
    MicroBatch,
    Over,
    Placement,
    Receive,
    Reduce,
    Release,
    Send,
    UnitKey,
)
from terashard.schedule.schedule import HEADER, Schedule, Unit

_CELL = r"(\d+)\.(\d+)\.(\d+)"
_COMPUTE = re.compile(rf"([FB]){_CELL}(?:/(\d+))?")
_SEND = re.compile(rf"S{_CELL}>(\d+)(&?)")
_RECEIVE = re.compile(rf"R{_CELL}<(\d+)")
_UNIT = re.compile(r"([GX])(\d+):(\d+)")
_REDUCE = re.compile(rf"A(\d+):(\d+)(?:\.(\d+))?@({'|'.join(OVERS)})")
_TOO_LONG = re.compile(r"\d{10,}")
_MICRO = re.compile(r"(\d+) \[(\d+(?:, *\d+)*)\]")


def parse_action(text: str) -> Action:
    """Read one action; ``ScheduleError`` if it is none."""
    _require_short(text)
    if found := _COMPUTE.fullmatch(text):
        kind = Forward if found[1] == "F" else Backward
        return kind(_cell(found, 2), int(found[5] or 0))
    if found := _SEND.fullmatch(text):
        return Send(_cell(found, 1), int(found[4]), bool(found[5]))
    if found := _RECEIVE.fullmatch(text):
        return Receive(_cell(found, 1), int(found[4]))
    if found := _UNIT.fullmatch(text):
        unit = UnitKey(int(found[2]), int(found[3]))
        return Gather(unit) if found[1] == "G" else Release(unit)
    if found := _REDUCE.fullmatch(text):
        micro = None if found[3] is None else int(found[3])
        return Reduce(UnitKey(int(found[1]), int(found[2])), cast(Over, found[4]), micro)
    raise ScheduleError(
        f"{text!r} is no action; actions look like F1.0.2, F1.0.2/1, B1.0.2, S1.0.2>2, S1.0.2>2&,"
        " R1.0.2<0, G1:3, X1:3, A1:3@shard, A1:3.0@shard"
    )


def parse(text: str) -> Schedule:
    """Read a schedule; ``ScheduleError`` names the line that is wrong."""
    lines = text.splitlines()
    if not lines or lines[0].strip() != HEADER:
        raise ScheduleError(f"this is no schedule: its first line must be {HEADER!r}")
    reader = _Reader()
    for number, line in enumerate(map(str.strip, lines[1:]), start=2):
        if not line or line.startswith("#"):
            continue
        try:
            reader.read(line)
        except (ValueError, ScheduleError, PlanError) as cause:
            shown = line if len(line) <= 60 else f"{line[:60]}…"
            raise ScheduleError(f"line {number} of the schedule ({shown}): {cause}") from cause
    try:
        return reader.schedule()
    except PlanError as cause:
        raise ScheduleError(f"the schedule's text is not complete: {cause}") from cause


def _require_short(text: str) -> None:
    """Columns of a schedule are machine integers."""
    if found := _TOO_LONG.search(text):
        raise ScheduleError(
            f"{found[0][:12]}… has {len(found[0])} digits, and a schedule's numbers have at most 9;"
            " correct it"
        )


def _cell(found: re.Match[str], first: int) -> Cell:
    return Cell(int(found[first]), int(found[first + 1]), int(found[first + 2]))


class _Reader:
    """Collects the lines of a schedule's text."""

    def __init__(self) -> None:
        self.ranks, self.chunks, self.placement, self.training = 0, 1, "looped", True
        self.micros: list[MicroBatch] = []
        self.units: list[list[Unit]] = []
        self.cuts: dict[Cell, tuple[int, ...]] = {}
        self.programs: list[list[Action]] = []

    def read(self, line: str) -> None:
        """Take in one line."""
        word, _, rest = line.partition(" ")
        if word != "unit":  # a unit's name may have any digits, and its place is checked below
            _require_short(rest)
        match word:
            case "ranks":
                self.ranks = int(rest)
            case "chunks":
                chunks, self.placement = rest.split()
                self.chunks = int(chunks)
            case "forward" if rest == "only":
                self.training = False
            case "micro":
                self._micro(rest)
            case "unit":
                self._unit(rest)
            case "cut":
                self._cut(rest)
            case "rank":
                self._rank(rest)
            case _:
                raise ValueError(
                    "a line begins with ranks, chunks, forward only, micro, unit, cut or rank"
                )

    def _micro(self, rest: str) -> None:
        found = _MICRO.fullmatch(rest)
        if found is None:
            raise ValueError("a micro-batch looks like: micro 1 [128, 128]")
        lengths = tuple(int(length) for length in found[2].split(","))
        self.micros.append(MicroBatch(int(found[1]), lengths))

    def _unit(self, rest: str) -> None:
        place, name, *words = rest.split()
        stage, index = map(int, place.split(":"))
        if stage >= self.ranks * self.chunks:
            raise ValueError(f"there is no stage {stage}")
        self.units += [[] for _ in range(self.ranks * self.chunks - len(self.units))]
        if index != len(self.units[stage]):
            raise ValueError(f"unit {stage}:{len(self.units[stage])} must come first")
        at = words.index("borrows") if "borrows" in words else len(words)
        words, lenders = words[:at], words[at + 1 :]
        head = words[-1:] == ["head"]
        words = words[:-1] if head else words
        each = words[-1:] == ["each"]
        sums = tuple(cast(list[Over], words[:-1] if each else words))
        self.units[stage].append(Unit(name, sums, head, tuple(lenders), each))

    def _cut(self, rest: str) -> None:
        place, *bounds = rest.split()
        cell = Cell(*map(int, place.split(".")))
        if cell in self.cuts:
            raise ValueError(f"cell {cell} has been cut before")
        self.cuts[cell] = tuple(map(int, bounds))

    def _rank(self, rest: str) -> None:
        rank, _, actions = rest.partition(":")
        if int(rank) != len(self.programs):
            raise ValueError(f"the program of rank {len(self.programs)} must come first")
        self.programs.append([parse_action(word) for word in actions.split()])

    def schedule(self) -> Schedule:
        """What was read, as a schedule."""
        grid = Grid(
            ranks=self.ranks,
            partition=tuple(self.micros),
            chunks=self.chunks,
            placement=cast(Placement, self.placement),
        )
        units = tuple(map(tuple, self.units))
        return Schedule.of(grid, self.programs, units=units, cuts=self.cuts, training=self.training)
