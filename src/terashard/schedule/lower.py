"""Lowerings: from cells alone to the full list, one concern at a time.

``insert_transfers`` puts a receive before what needs it and a send behind what makes it,
``split_at_units`` cuts cells into segments, ``insert_sharding`` puts in gathers, releases and
reductions, ``fuse_pairs`` marks sends that neighbours whose sends block must issue together with a
receive.
Each takes a schedule and returns a new one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from terashard.errors import ScheduleError
from terashard.schedule.actions import (
    Action,
    Backward,
    Cell,
    Forward,
    Gather,
    Receive,
    Reduce,
    Release,
    Send,
    UnitKey,
)
from terashard.schedule.budget import Moves, Place
from terashard.schedule.compile import Index
from terashard.schedule.needs import (
    reduction_of,
    reductions,
    reductions_before,
    transfers,
    units_fed,
    units_used,
)
from terashard.schedule.schedule import Schedule, Unit


def insert_transfers(schedule: Schedule) -> Schedule:
    """A ``Receive`` right before the cell that needs it, a ``Send`` right behind what makes it."""
    columns = np.concatenate(schedule.programs)
    found = transfers(schedule, columns)
    made = Index(columns).find(found.makers)
    there = made >= 0
    # The place of every action is a multiple of 3; what stands before or behind it is one off.
    place = [3 * found.wanted - 1, 3 * np.arange(len(columns)), 3 * made[there] + 1]
    rows = np.concatenate([found.receives, columns, found.sends[there]])
    order = np.argsort(np.concatenate(place))
    ends = 3 * np.cumsum([len(program) for program in schedule.programs]) - 1
    cuts = np.searchsorted(np.concatenate(place)[order], ends)
    return replace(schedule, programs=tuple(np.split(rows[order], cuts[:-1])))


def split_at_units(schedule: Schedule, cuts: Mapping[Cell, tuple[int, ...]]) -> Schedule:
    """Cut every cell named in ``cuts`` into segments that end at the given unit boundaries."""

    def split(action: Action) -> Iterable[Action]:
        match action:
            case Forward(cell) if cell in cuts:
                return [Forward(cell, k) for k in range(len(cuts[cell]) + 1)]
            case Backward(cell) if cell in cuts:
                return [Backward(cell, k) for k in reversed(range(len(cuts[cell]) + 1))]
            case _:
                return [action]

    if schedule.cuts:
        raise ScheduleError(
            "this schedule is cut into segments already; cut the schedule it was made from"
        )
    programs = [[part for action in program for part in split(action)] for program in schedule]
    return schedule.with_actions(programs, cuts=dict(cuts))


def last_backward_cuts(
    schedule: Schedule, units: Sequence[Sequence[Unit]]
) -> dict[Cell, tuple[int, ...]]:
    """Cuts that let a unit's gradient travel while the rest of the last backward cell runs.

    The last of the step, or of every micro-batch after which there is a sum.
    """
    each = {s for s, stage in enumerate(units) if any(unit.each_micro for unit in stage)}
    last: dict[tuple[int, int], Cell] = {}
    for program in schedule:
        for action in program:
            if isinstance(action, Backward):
                cell = action.cell
                last[cell.stage, cell.micro if cell.stage in each else -1] = cell
    bodies = {stage: len(units[stage]) - units[stage][-1].head for stage, _ in last}
    return {
        cell: tuple(range(1, bodies[cell.stage]))
        for cell in last.values()
        if bodies[cell.stage] > 1
    }


def insert_sharding(
    schedule: Schedule, units: Sequence[Sequence[Unit]], moves: Moves | None = None
) -> Schedule:
    """Gather units, release them, and reduce each when its gradient is final.

    Without ``moves`` every unit is gathered once and released after its last use: the whole stage
    stays gathered in between, and gathers are issued at the start of the step, where the pipe is
    empty. With them, gathers and releases come where they say. A tied weight's sum over two stages
    is issued last, when nothing waits for either of them.
    """
    bare = schedule.with_actions(
        [[] for _ in range(schedule.grid.ranks)], units=tuple(map(tuple, units))
    )
    programs = [
        _sharded(bare, program, moves, moves.first[rank] if moves else ())
        for rank, program in enumerate(schedule)
    ]
    return bare.with_actions(programs)


def _sharded(
    schedule: Schedule, program: Sequence[Action], moves: Moves | None, first: Sequence[Action]
) -> list[Action]:
    used, final = _last_reads(schedule, program), _last_feeds(schedule, program)
    body: list[Action] = list(first) if moves else [Gather(unit) for unit in used]
    waiting: list[Action] = []
    ties: list[Action] = []
    for position, action in enumerate(program):
        # A send goes first: another stage waits for it, and nobody for a reduction.
        if not isinstance(action, Send):
            body += waiting
            waiting = []
        body.append(action)
        if moves is None:
            waiting += [Release(unit) for unit, last in used.items() if last == position]
        elif isinstance(action, Forward | Backward):
            waiting += moves.behind.get(_arrived(schedule, action), ())
        for reduce in final.get(position, ()):
            (ties if reduce.over == "tie" else waiting).append(reduce)
    return [*body, *waiting, *ties]


def _arrived(schedule: Schedule, action: Forward | Backward) -> Place:
    """The unit boundary at which a segment ends."""
    cell = action.cell
    bounds = (0, *schedule.cuts.get(cell, ()), len(schedule.units[cell.stage]))
    if isinstance(action, Forward):
        return True, cell, bounds[action.segment + 1]
    return False, cell, bounds[action.segment]


def _last_reads(schedule: Schedule, program: Sequence[Action]) -> dict[UnitKey, int]:
    """Units that the program reads, in order of first use, each with the last place."""
    return {
        UnitKey(action.cell.stage, index): position
        for position, action in enumerate(program)
        if isinstance(action, Forward | Backward)
        for index in units_used(schedule, action)
    }


def _last_feeds(schedule: Schedule, program: Sequence[Action]) -> dict[int, list[Reduce]]:
    """By place: the sums that take up gradients that are final there, and those behind them."""
    last: dict[Reduce, int] = {}
    for position, action in enumerate(program):
        if isinstance(action, Forward | Backward):
            for index in units_fed(schedule, action):
                unit = UnitKey(action.cell.stage, index)
                if schedule.units[unit.stage][unit.index].reductions:
                    last[reduction_of(schedule, unit, action.cell)] = position
    for unit in dict.fromkeys(reduce.unit for reduce in last):
        for reduce in reductions(schedule, unit):
            if reduce not in last:
                last[reduce] = max(last[one] for one in reductions_before(schedule, reduce))
    due: dict[int, list[Reduce]] = {}
    for reduce, position in last.items():
        due.setdefault(position, []).append(reduce)
    return due


def fuse_pairs(schedule: Schedule) -> Schedule:
    """Mark every send that a receive from the same rank follows, for transports whose sends block.

    Such a transport must issue both together. The transports of today buffer sends, and the worker
    issues every send without waiting: it performs a paired send as any other.
    """
    rank_of = schedule.grid.rank_of

    def fused(program: Sequence[Action]) -> Iterator[Action]:
        for action, following in zip(program, [*program[1:], None], strict=True):
            match action, following:
                case Send(cell, to), Receive(_, source) if rank_of(to) == rank_of(source):
                    yield Send(cell, to, paired=True)
                case _:
                    yield action

    return schedule.with_actions([list(fused(program)) for program in schedule])
