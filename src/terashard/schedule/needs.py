"""What must come before what. It is stated here and nowhere else.

Two kinds of need:

- *Between actions that happen once*: the table ``ROWS``. A row says "an action of this kind, when
  this holds, needs that action". It is written on whole columns, so that one action and a whole
  program are read by the same code. ``transfers`` reads off which messages there must be.
- *Of parameters*, which may be gathered again and again: ``units_used`` says which units an action
  reads (they must be full then), ``units_fed`` to whose gradients it adds (their ``Reduce`` must
  come later), ``reductions`` which sums there are, ``reductions_before`` which precede which, and
  ``reduction_of`` which one takes up what a cell adds.

Symbols: F(s,m,t,k) is the forward of segment k of the cell (stage s, micro-batch m, slice t), B
its backward. With K segments and T slices::

    F(s,m,t,0) needs F(s,m,t-1,K-1), whose carry it reads, and the output of stage s-1
    F(s,m,t,k) needs F(s,m,t,k-1)
    B(s,m,t,K-1) needs F(s,m,t,K-1), B(s,m,t+1,0), which owes it, and the gradient from stage s+1
    B(s,m,t,k) needs B(s,m,t,k+1)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from terashard.schedule.actions import (
    BACKWARD,
    FORWARD,
    KIND,
    MICRO,
    PART,
    PEER,
    RECEIVE,
    SEND,
    SLICE,
    STAGE,
    Action,
    Backward,
    Cell,
    Forward,
    Reduce,
    UnitKey,
    decode,
    encode,
)
from terashard.schedule.schedule import Columns, Schedule, Unit

Segment: TypeAlias = Literal["first", "last", "previous", "next"]
Mask: TypeAlias = NDArray[np.bool_]


class Facts:
    """What the table asks about actions; every attribute is one array over the actions."""

    def __init__(self, schedule: Schedule, columns: Columns) -> None:
        self.shape = schedule.shape
        self.kind, self.stage, self.micro = columns[:, KIND], columns[:, STAGE], columns[:, MICRO]
        self.slice, self.part, self.peer = columns[:, SLICE], columns[:, PART], columns[:, PEER]

    @cached_property
    def top(self) -> Columns:
        """The last segment of the action's cell."""
        return self.shape.segments[self.stage, self.micro, self.slice] - 1

    @cached_property
    def last_slice(self) -> Columns:
        """The last slice of the action's micro-batch."""
        return self.shape.slices[self.micro] - 1

    @cached_property
    def has_before(self) -> Mask:
        """Whether a stage comes before."""
        return self.stage > 0

    @cached_property
    def has_after(self) -> Mask:
        """Whether a stage comes after."""
        return self.stage < len(self.shape.rank_of) - 1

    @cached_property
    def from_afar(self) -> Mask:
        """Whether the stage before is on another rank."""
        return self.has_before & ~self._same_rank(-1)

    @cached_property
    def to_afar(self) -> Mask:
        """Whether the stage after is on another rank."""
        return self.has_after & ~self._same_rank(1)

    def _same_rank(self, shift: int) -> Mask:
        ranks = self.shape.rank_of
        other = np.clip(self.stage + shift, 0, len(ranks) - 1)
        return np.asarray(ranks[other] == ranks[self.stage])


@dataclass(frozen=True)
class _Row:
    """An action of kind ``of``, when ``when`` holds, needs one of kind ``needs``, so far away."""

    of: int
    needs: int
    when: Callable[[Facts], Mask]
    stage: int = 0
    slice: int = 0
    segment: Segment = "first"
    peer: int | None = None  # the needed action's peer, as a shift from its stage
    swap: bool = False  # a receive needs the send on its peer stage, addressed to it


ROWS: tuple[_Row, ...] = (
    # F(k) continues F(k-1); the first segment needs the whole slice before, and its input.
    _Row(FORWARD, FORWARD, lambda f: f.part > 0, segment="previous"),
    _Row(FORWARD, FORWARD, lambda f: (f.part == 0) & (f.slice > 0), slice=-1, segment="last"),
    _Row(FORWARD, RECEIVE, lambda f: (f.part == 0) & f.from_afar, peer=-1),
    _Row(
        FORWARD,
        FORWARD,
        lambda f: (f.part == 0) & f.has_before & ~f.from_afar,
        stage=-1,
        segment="last",
    ),
    # B(k) continues B(k+1); the top one needs its forward, the slice after, and its gradient.
    _Row(BACKWARD, BACKWARD, lambda f: f.part < f.top, segment="next"),
    _Row(BACKWARD, FORWARD, lambda f: f.part == f.top, segment="last"),
    _Row(BACKWARD, BACKWARD, lambda f: (f.part == f.top) & (f.slice < f.last_slice), slice=1),
    _Row(BACKWARD, RECEIVE, lambda f: (f.part == f.top) & f.to_afar, peer=1),
    _Row(BACKWARD, BACKWARD, lambda f: (f.part == f.top) & f.has_after & ~f.to_afar, stage=1),
    # What is sent must have been made; what is received must have been sent.
    _Row(SEND, FORWARD, lambda f: f.peer > f.stage, segment="last"),
    _Row(SEND, BACKWARD, lambda f: f.peer < f.stage),
    _Row(RECEIVE, SEND, lambda f: f.peer >= 0, swap=True),
)


def needed(schedule: Schedule, columns: Columns) -> Iterator[tuple[Columns, Columns]]:
    """By row of the table: positions in ``columns``, and the columns of what each of them needs."""
    facts = Facts(schedule, columns)
    for row in ROWS:
        at = np.flatnonzero((facts.kind == row.of) & row.when(facts))
        if len(at):
            yield at, _target(facts, row, columns[at])


def needs(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """The actions of the table that must be done before ``action``."""
    one = np.array([encode(action)], np.int64)
    return tuple(decode(tuple(t[0].tolist())) for _, t in needed(schedule, one))


@dataclass(frozen=True, eq=False)
class Transfers:
    """Every message between ranks that compute actions need; entry k of each is of message k."""

    wanted: Columns
    """[M] position of the action that needs the message."""
    receives: Columns
    """[M, 6] the receive."""
    sends: Columns
    """[M, 6] the send on the other rank."""
    makers: Columns
    """[M, 6] the action that makes what is sent."""


def transfers(schedule: Schedule, computes: Columns) -> Transfers:
    """The messages that the forward and backward cells among ``computes`` ask for, by the table."""
    found = [(at, rows) for at, rows in needed(schedule, computes) if rows[0, KIND] == RECEIVE]
    wanted = np.concatenate([np.empty(0, np.int64), *(at for at, _ in found)])
    receives = np.concatenate([np.empty((0, 6), np.int64), *(rows for _, rows in found)])
    sends = _only_need(schedule, receives)
    return Transfers(wanted, receives, sends, _only_need(schedule, sends))


def _only_need(schedule: Schedule, columns: Columns) -> Columns:
    """Row by row, the one thing that each of ``columns`` needs."""
    rows = np.empty_like(columns)
    for at, target in needed(schedule, columns):
        rows[at] = target
    return rows


def units_used(schedule: Schedule, action: Action) -> tuple[int, ...]:
    """Indices of the units of its stage that must be full while ``action`` runs, ascending."""
    match action:
        case Forward(cell, segment):
            return _with_lenders(schedule, cell, _segment_units(schedule, cell, segment))
        case Backward(cell, segment):
            units = _segment_units(schedule, cell, segment)
            body = range(units.start, min(units.stop, _body(schedule, cell.stage)))
            return _with_lenders(schedule, cell, body)
        case _:
            return ()


def units_fed(schedule: Schedule, action: Action) -> tuple[int, ...]:
    """Indices of the units of its stage whose gradients ``action`` adds to, ascending.

    A head is fed by forward cells, because its gradient is made together with the loss, and so is a
    unit that the head borrows from.
    """
    match action:
        case Forward(cell, segment) if schedule.training:
            units = _segment_units(schedule, cell, segment)
            head = range(max(units.start, _body(schedule, cell.stage)), units.stop)
            return _with_lenders(schedule, cell, head)
        case Backward():
            return units_used(schedule, action)
        case _:
            return ()


def reductions(schedule: Schedule, unit: UnitKey) -> tuple[Reduce, ...]:
    """The sums of the gradient of ``unit``, axis after axis."""
    described = schedule.units[unit.stage][unit.index]
    each = range(schedule.grid.num_micros) if described.each_micro else (None,)
    return tuple(
        Reduce(unit, over, micro)
        for over in described.reductions
        for micro in (each if over == "shard" else (None,))
    )


def reductions_before(schedule: Schedule, reduce: Reduce) -> tuple[Reduce, ...]:
    """The sums that ``reduce`` needs: all over the axis before. Micro-batches come as they do."""
    overs = schedule.units[reduce.unit.stage][reduce.unit.index].reductions
    place = overs.index(reduce.over)
    before = overs[place - 1] if place else None
    return tuple(one for one in reductions(schedule, reduce.unit) if one.over == before)


def reduction_of(schedule: Schedule, unit: UnitKey, cell: Cell) -> Reduce:
    """The sum that must not be taken before what ``cell`` adds to the gradient of ``unit``."""
    each = schedule.units[unit.stage][unit.index].each_micro
    return Reduce(unit, "shard", cell.micro if each else None)


def _target(facts: Facts, row: _Row, columns: Columns) -> Columns:
    target = columns.copy()
    target[:, KIND] = row.needs
    if row.swap:
        target[:, STAGE], target[:, PEER], target[:, PART] = columns[:, PEER], columns[:, STAGE], 0
        return target
    target[:, STAGE] += row.stage
    target[:, SLICE] += row.slice
    target[:, PEER] = -1 if row.peer is None else target[:, STAGE] + row.peer
    target[:, PART] = _segment(facts, row.segment, columns, target)
    return target


def _segment(facts: Facts, rule: Segment, columns: Columns, target: Columns) -> Columns:
    match rule:
        case "first":
            return np.zeros(len(columns), np.int64)
        case "last":
            cells = target[:, STAGE], target[:, MICRO], target[:, SLICE]
            return np.asarray(facts.shape.segments[cells] - 1)
        case "previous":
            return np.asarray(columns[:, PART] - 1)
        case "next":
            return np.asarray(columns[:, PART] + 1)


def _segment_units(schedule: Schedule, cell: Cell, segment: int) -> range:
    if not schedule.units:
        return range(0)
    bounds = (0, *schedule.cuts.get(cell, ()), len(schedule.units[cell.stage]))
    return range(bounds[segment], bounds[segment + 1])


def _with_lenders(schedule: Schedule, cell: Cell, units: range) -> tuple[int, ...]:
    """``units`` and those that they borrow from."""
    stage: Sequence[Unit] = schedule.units[cell.stage] if schedule.units else ()
    lenders = {name for index in units for name in stage[index].borrows}
    if not lenders:
        return tuple(units)
    lent = (index for index, unit in enumerate(stage) if unit.name in lenders)
    return tuple(sorted({*units, *lent}))


def _body(schedule: Schedule, stage: int) -> int:
    """Units of ``stage`` before its head."""
    units = schedule.units[stage] if schedule.units else ()
    return len(units) - bool(units and units[-1].head)
