"""The grammar of a schedule: grids, cells, and the actions that a rank performs.

A step works on micro-batches of whole sequences; every sequence of a micro-batch is cut into the
same token slices. One slice of one micro-batch on one stage is a *cell*. What a rank does is a
list of *actions*, frozen values that cannot be built wrong: a ``Gather`` has no slice, a
``Forward`` has no peer. Written as text (``text.py`` reads it back)::

    F1.0.2      forward of stage 1, micro-batch 0, slice 2
    B1.0.2      its backward
    F1.0.2/1    only its second segment: the next units of the stage
    S1.0.2>2    send to stage 2 what cell 1.0.2 made: its output; to stage 0: its input's gradient
    S1.0.2>2&   the same, in one with the receive that follows, should sends block
    R1.0.2<0    receive for cell 1.0.2 from stage 0: its input; from stage 2: its output's gradient
    G1:3  X1:3  gather, release the parameters of unit 3 of stage 1
    A1:3@shard  add up the gradients of unit 3 of stage 1 over the ranks that share it out
    A1:3.0@shard  the same after micro-batch 0, if its gradient is summed after every one

For storage and for fast reading an action is also a row of six integers: ``encode``, ``decode``.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias, get_args

from terashard.errors import PlanError, ScheduleError

Over: TypeAlias = Literal["shard", "replica", "tie"]
OVERS: tuple[Over, ...] = get_args(Over)
"""The sums that a gradient may go through, in the order in which they are taken."""
Placement: TypeAlias = Literal["looped", "v"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
Way: TypeAlias = Literal["down", "up"]
WAYS: tuple[Way, ...] = get_args(Way)
"""Activations travel down, to a later stage; gradients travel up."""


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One slice of one micro-batch on one stage."""

    stage: int
    micro: int
    slice: int

    def __str__(self) -> str:
        return f"{self.stage}.{self.micro}.{self.slice}"


@dataclass(frozen=True, slots=True, order=True)
class UnitKey:
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
                f"a micro-batch of {self.sequences} sequences in slices {list(self.slices)} has no"
                " work; it needs at least one sequence, and slices of at least one token"
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
    "looped" puts it on rank ``g mod ranks``, "v" goes down the ranks and back up.
    """

    ranks: int
    partition: tuple[MicroBatch, ...]
    chunks: int = 1
    placement: Placement = "looped"

    def __post_init__(self) -> None:
        """Refuse an empty grid."""
        if self.ranks < 1 or self.chunks < 1 or not self.partition:
            raise PlanError(
                f"a grid of {self.ranks} ranks, {self.chunks} chunks per rank and"
                f" {len(self.partition)} micro-batches has no work; it needs at least one of each"
            )
        if self.placement not in PLACEMENTS:
            raise PlanError(
                f"there is no placement {self.placement!r}; there are: {', '.join(PLACEMENTS)}"
            )

    @classmethod
    def uniform(cls, ranks: int, micros: int, slices: int, length: int = 1) -> "Grid":
        """``micros`` micro-batches of one sequence, each in ``slices`` slices of ``length``."""
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

    def __contains__(self, cell: Cell) -> bool:
        return (
            0 <= cell.stage < self.num_stages
            and 0 <= cell.micro < self.num_micros
            and 0 <= cell.slice < self.num_slices[cell.micro]
        )


@dataclass(frozen=True, slots=True)
class Forward:
    """Run segment ``segment`` of ``cell`` forward."""

    cell: Cell
    segment: int = 0

    def __str__(self) -> str:
        return f"F{self.cell}" + (f"/{self.segment}" if self.segment else "")


@dataclass(frozen=True, slots=True)
class Backward:
    """Run segment ``segment`` of ``cell`` backward: gradients of its input and parameters."""

    cell: Cell
    segment: int = 0

    def __str__(self) -> str:
        return f"B{self.cell}" + (f"/{self.segment}" if self.segment else "")


@dataclass(frozen=True, slots=True)
class Send:
    """Send what ``cell`` made to stage ``to``.

    The next stage gets the cell's output, the stage before gets its input's gradient. ``paired``
    is for transports whose sends block until they are received: this one may only be done together
    with the ``Receive`` that follows, so that two neighbours can swap. The transports of today
    buffer sends and the worker waits for none, so a pair asks nothing more of them.
    """

    cell: Cell
    to: int
    paired: bool = False

    def __str__(self) -> str:
        return f"S{self.cell}>{self.to}" + ("&" if self.paired else "")

    @property
    def way(self) -> Way:
        """Which way the message goes."""
        return "down" if self.to > self.cell.stage else "up"

    def receive(self) -> "Receive":
        """The other side of this message."""
        return Receive(Cell(self.to, self.cell.micro, self.cell.slice), self.cell.stage)


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive for ``cell`` from stage ``source``: its input, or its output's gradient."""

    cell: Cell
    source: int

    def __str__(self) -> str:
        return f"R{self.cell}<{self.source}"

    @property
    def way(self) -> Way:
        """Which way the message goes."""
        return "down" if self.source < self.cell.stage else "up"

    def send(self) -> Send:
        """The other side of this message."""
        return Send(Cell(self.source, self.cell.micro, self.cell.slice), self.cell.stage)


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
    """Sum the gradients of ``unit`` over its shards, its replicas, or the two stages of a tie.

    With ``micro`` it sums what has come together since the sum before, and adds that to the shard's
    part: all of micro-batch ``micro``, and of later ones what is there already.
    """

    unit: UnitKey
    over: Over = "shard"
    micro: int | None = None

    def __str__(self) -> str:
        return f"A{self.unit}" + ("" if self.micro is None else f".{self.micro}") + f"@{self.over}"


Action: TypeAlias = Forward | Backward | Send | Receive | Gather | Release | Reduce

KINDS: tuple[type, ...] = get_args(Action)
FORWARD, BACKWARD, SEND, RECEIVE, GATHER, RELEASE, REDUCE = range(len(KINDS))
KIND, STAGE, MICRO, SLICE, PART, PEER = range(6)
"""Columns of a row: PART is a segment, a unit or ``paired``; PEER a stage or an ``Over``."""

Row: TypeAlias = tuple[int, int, int, int, int, int]


def encode(action: Action) -> Row:
    """``action`` as a row of integers."""
    match action:
        case Forward(cell, segment):
            return FORWARD, cell.stage, cell.micro, cell.slice, segment, -1
        case Backward(cell, segment):
            return BACKWARD, cell.stage, cell.micro, cell.slice, segment, -1
        case Send(cell, to, paired):
            return SEND, cell.stage, cell.micro, cell.slice, int(paired), to
        case Receive(cell, source):
            return RECEIVE, cell.stage, cell.micro, cell.slice, 0, source
        case Gather(unit):
            return GATHER, unit.stage, -1, -1, unit.index, -1
        case Release(unit):
            return RELEASE, unit.stage, -1, -1, unit.index, -1
        case Reduce(unit, over, micro):
            of = -1 if micro is None else micro
            return REDUCE, unit.stage, of, -1, unit.index, OVERS.index(over)


def decode(row: Row) -> Action:
    """The action that ``encode`` made ``row`` from."""
    kind, stage, micro, index, part, peer = row
    if kind == FORWARD:
        return Forward(Cell(stage, micro, index), part)
    if kind == BACKWARD:
        return Backward(Cell(stage, micro, index), part)
    if kind == SEND:
        return Send(Cell(stage, micro, index), peer, bool(part))
    if kind == RECEIVE:
        return Receive(Cell(stage, micro, index), peer)
    if kind == GATHER:
        return Gather(UnitKey(stage, part))
    if kind == RELEASE:
        return Release(UnitKey(stage, part))
    if kind == REDUCE:
        return Reduce(UnitKey(stage, part), OVERS[peer], None if micro < 0 else micro)
    raise ScheduleError(f"{list(row)} is no action; kinds are numbered 0 to {REDUCE}")
