"""The grammar of a schedule: cells, actions, and the one list that says what every rank does, in order.

A step works on micro-batches of whole sequences; every sequence of a micro-batch is cut into the
same token slices.
One slice of one micro-batch on one stage is a *cell*. What a rank does is a list of *actions*,
frozen values that
cannot be built wrong: a ``Gather`` has no slice, a ``Forward`` has no peer. Written as text, left
to right:

    F1.0.2      forward of stage 1, micro-batch 0, slice 2          B1.0.2      its backward
    F1.0.2/1    … only its second segment: the next units of the stage
    S1.0.2>2    send what cell 1.0.2 made to stage 2 (an activation); S1.0.2>0 sends a gradient back
    S1.0.2>2&   … issued together with the receive that follows
    R1.0.2<0    receive for cell 1.0.2 from stage 0 (an activation)
    G1:3  X1:3  gather, release the parameters of unit 3 of stage 1
    A1:3@shard  add up the gradients of unit 3 of stage 1 over the ranks that share it out

A ``Schedule`` keeps actions as integer columns, one array per rank, and yields these values when
iterated.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias, get_args

from terashard.errors import PlanError, ScheduleError

Over: TypeAlias = Literal["shard", "replica", "tie"]
OVERS: tuple[Over, ...] = get_args(Over)
Placement: TypeAlias = Literal["looped", "v"]


class Cell(NamedTuple):
    """One slice of one micro-batch on one stage."""

    stage: int
    micro: int
    slice: int

    def __str__(self) -> str:
        return f"{self.stage}.{self.micro}.{self.slice}"


class UnitKey(NamedTuple):
    """Unit ``index`` of ``stage``: parameters that travel together."""

    stage: int
    index: int

    def __str__(self) -> str:
        return f"{self.stage}:{self.index}"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that go through the pipeline together, and the lengths of their token slices."""

    sequences: int
    slices: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse a micro-batch without work."""
        if self.sequences < 1 or not self.slices or min(self.slices) < 1:
            raise PlanError(
                f"a micro-batch of {self.sequences} sequences in slices {list(self.slices)} has no work;"
                " it needs at least one sequence, and slices of at least one token"
            )

    @property
    def tokens(self) -> int:
        """Tokens of one sequence."""
        return sum(self.slices)

    def bounds(self, index: int) -> tuple[int, int]:
        """First token, and token after the last, of slice ``index``."""
        start = sum(self.slices[:index])
        return start, start + self.slices[index]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Pipeline ranks, (virtual) stages on each, and the micro-batches and slices of a step.

    ``placement`` says which rank holds stage ``g`` when there are several ``chunks`` per rank:
    "looped" puts it on
    rank ``g mod ranks``, "v" goes down the ranks and back up.
    """

    ranks: int
    partition: tuple[MicroBatch, ...]
    chunks: int = 1
    placement: Placement = "looped"

    def __post_init__(self) -> None:
        """Refuse an empty grid."""
        if self.ranks < 1 or self.chunks < 1 or not self.partition:
            raise PlanError(
                "a grid needs at least one rank, one chunk per rank and one micro-batch"
            )

    @classmethod
    def uniform(cls, ranks: int, micros: int, slices: int, length: int = 1) -> "Grid":
        """A grid of ``micros`` equal micro-batches of one sequence in ``slices`` slices of ``length`` tokens."""
        return cls(ranks=ranks, partition=(MicroBatch(1, (length,) * slices),) * micros)

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.ranks * self.chunks

    @property
    def num_micros(self) -> int:
        """Micro-batches of a step."""
        return len(self.partition)

    @cached_property
    def num_slices(self) -> tuple[int, ...]:
        """Slices of every micro-batch."""
        return tuple(len(micro.slices) for micro in self.partition)

    def rank_of(self, stage: int) -> int:
        """Pipeline rank that holds ``stage``."""
        lap, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.placement == "v" and lap % 2 else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages on ``rank``, in order."""
        return tuple(s for s in range(self.num_stages) if self.rank_of(s) == rank)

    def cells(self, stage: int) -> tuple[Cell, ...]:
        """Every cell of ``stage``, micro-batch after micro-batch, slices upward."""
        return tuple(Cell(stage, m, t) for m, n in enumerate(self.num_slices) for t in range(n))


@dataclass(frozen=True, slots=True)
class Forward:
    """Run segment ``segment`` of ``cell`` forward."""

    cell: Cell
    segment: int = 0

    def __str__(self) -> str:
        return f"F{self.cell}" + (f"/{self.segment}" if self.segment else "")


@dataclass(frozen=True, slots=True)
class Backward:
    """Run segment ``segment`` of ``cell`` backward: gradients of its input and of its parameters."""

    cell: Cell
    segment: int = 0

    def __str__(self) -> str:
        return f"B{self.cell}" + (f"/{self.segment}" if self.segment else "")


@dataclass(frozen=True, slots=True)
class Send:
    """Send what ``cell`` made to stage ``to``: its output to the next stage, its input's gradient to the one before.

    ``paired``: issued together with the ``Receive`` that follows, so that two blocking neighbours
    can swap.
    """

    cell: Cell
    to: int
    paired: bool = False

    def __str__(self) -> str:
        return f"S{self.cell}>{self.to}" + ("&" if self.paired else "")


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive for ``cell`` from stage ``source``: its input, or its output's gradient."""

    cell: Cell
    source: int

    def __str__(self) -> str:
        return f"R{self.cell}<{self.source}"


@dataclass(frozen=True, slots=True)
class Gather:
    """Make the full parameters of ``unit`` from the shards of all ranks."""

    unit: UnitKey

    def __str__(self) -> str:
        return f"G{self.unit}"


@dataclass(frozen=True, slots=True)
class Release:
    """Give back the full parameters of ``unit``; its shard stays."""

    unit: UnitKey

    def __str__(self) -> str:
        return f"X{self.unit}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum the gradients of ``unit``: over its shards, over replicas, or over the two stages of a tied weight."""

    unit: UnitKey
    over: Over = "shard"

    def __str__(self) -> str:
        return f"A{self.unit}@{self.over}"


Action: TypeAlias = Forward | Backward | Send | Receive | Gather | Release | Reduce

KINDS: tuple[type, ...] = (Forward, Backward, Send, Receive, Gather, Release, Reduce)
FORWARD, BACKWARD, SEND, RECEIVE, GATHER, RELEASE, REDUCE = range(len(KINDS))
KIND, STAGE, MICRO, SLICE, PART, PEER = range(6)
"""Columns of an action as integers; PART is a segment, a unit or the ``paired`` flag, PEER a stage or an ``Over``."""

Row: TypeAlias = tuple[int, int, int, int, int, int]


def encode(action: Action) -> Row:
    """``action`` as integer columns."""
    match action:
        case Forward(cell, segment):
            return (FORWARD, *cell, segment, -1)
        case Backward(cell, segment):
            return (BACKWARD, *cell, segment, -1)
        case Send(cell, to, paired):
            return (SEND, *cell, int(paired), to)
        case Receive(cell, source):
            return (RECEIVE, *cell, 0, source)
        case Gather(unit):
            return (GATHER, unit.stage, -1, -1, unit.index, -1)
        case Release(unit):
            return (RELEASE, unit.stage, -1, -1, unit.index, -1)
        case Reduce(unit, over):
            return (REDUCE, unit.stage, -1, -1, unit.index, OVERS.index(over))


def decode(row: Row) -> Action:
    """The action that ``encode`` made ``row`` from."""
    kind, stage, micro, index, part, peer = row
    cell, unit = Cell(stage, micro, index), UnitKey(stage, part)
    makers = {
        FORWARD: lambda: Forward(cell, part),
        BACKWARD: lambda: Backward(cell, part),
        SEND: lambda: Send(cell, peer, bool(part)),
        RECEIVE: lambda: Receive(cell, peer),
        GATHER: lambda: Gather(unit),
        RELEASE: lambda: Release(unit),
        REDUCE: lambda: Reduce(unit, OVERS[peer]),
    }
    made: Action = makers[kind]()
    return made


_ACTION = re.compile(
    r"(?P<kind>[FBSRGXA])(?P<stage>\d+)(?:\.(?P<micro>\d+)\.(?P<slice>\d+)|:(?P<unit>\d+))"
    r"(?:/(?P<segment>\d+)|[<>](?P<peer>\d+)(?P<paired>&?)|@(?P<over>shard|replica|tie))?"
)
_SHAPES = {"F": "cs", "B": "cs", "S": "cp", "R": "cp", "G": "u", "X": "u", "A": "uo"}


def parse_action(text: str) -> Action:
    """Read one action from its text; ``ScheduleError`` if it is none."""
    found = _ACTION.fullmatch(text)
    if found is None or not _well_formed(found, text):
        raise ScheduleError(
            f"{text!r} is no action; actions look like F1.0.2, F1.0.2/1, B1.0.2, S1.0.2>2, R1.0.2<0, G1:3, X1:3, A1:3@shard"
        )
    group, stage = found.groupdict(), int(found["stage"])
    if group["unit"] is not None:
        unit = UnitKey(stage, int(group["unit"]))
        if text[0] == "A":
            return Reduce(unit, group["over"])
        return Gather(unit) if text[0] == "G" else Release(unit)
    cell = Cell(stage, int(group["micro"]), int(group["slice"]))
    if text[0] in "FB":
        return (Forward if text[0] == "F" else Backward)(cell, int(group["segment"] or 0))
    if text[0] == "S":
        return Send(cell, int(group["peer"]), bool(group["paired"]))
    return Receive(cell, int(group["peer"]))


def _well_formed(found: "re.Match[str]", text: str) -> bool:
    """Whether the parts that were found belong to this kind of action."""
    shape = _SHAPES[text[0]]
    arrow = {"S": ">", "R": "<"}.get(text[0])
    return (
        (found["unit"] is not None) == ("u" in shape)
        and (found["segment"] is None or "s" in shape)
        and (found["peer"] is not None) == ("p" in shape)
        and (arrow is None or arrow in text)
        and (not found["paired"] or text[0] == "S")
        and (found["over"] is not None) == ("o" in shape)
    )
