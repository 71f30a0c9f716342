"""Refuses a schedule that would hang, lose work, or read what is not there.

Proved of a schedule that passes:

1. *Complete.* Every cell, transfer and reduction that the grid and the units ask for is there
   exactly once, on the rank of its stage, and nothing else. Units that are tied are one on the
   first and one on the last stage, on two ranks.
2. *In order.* On every rank, an action stands behind all that it needs there.
3. *Resident.* Parameters are full whenever they are read, gathered only when they are not full,
   released only after they were read, and all released at the end. Every contribution to a
   gradient enters exactly one sum over shards: the step's, or the first one behind it where there
   is one for every micro-batch. Sums come in their order.
4. *Delivered.* From one rank to another, activations (and gradients) are sent in the order in
   which they are asked for; a paired send is followed by a receive from the rank it sends to.
5. *Ending.* All ranks come to the end, under the stated assumption on sends: ``buffered`` (a send
   returns at once) or ``blocking`` (a send returns when the receiver stands at the receive).

Programs that are not one per rank, units not listed by stage and cuts outside the grid are refused
when a ``Schedule`` is made.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from terashard.errors import ScheduleError
from terashard.schedule.actions import (
    Action,
    Backward,
    Forward,
    Gather,
    Receive,
    Reduce,
    Release,
    Send,
    UnitKey,
    Way,
    decode,
    encode,
)
from terashard.schedule.compile import Index, Program, compile_schedule
from terashard.schedule.needs import reductions, transfers
from terashard.schedule.progress import Sends, check_ends
from terashard.schedule.schedule import Columns, Schedule

Programs: TypeAlias = Sequence[Sequence[Action]]
Channel: TypeAlias = tuple[int, int, Way]
"""Sending rank, receiving rank, and whether activations or gradients travel."""


def check(schedule: Schedule, *, sends: Sends = "buffered") -> Program:
    """Return ``schedule`` compiled if it is right; raise ``ScheduleError`` if it is not."""
    programs = list(schedule)
    _check_places(schedule, programs)
    _check_ties(schedule)
    _check_complete(schedule, programs)
    program = compile_schedule(schedule)
    assert not program.missing, "a complete schedule meets every need of the table"
    _check_order(program)
    _check_pairs(schedule, programs)
    _check_channels(schedule, programs)
    check_ends(program, sends)
    return program


def expected(schedule: Schedule) -> Columns:
    """What must be there once, as rows: cells, the transfers between them, reductions."""
    grid, kinds = schedule.grid, (Forward, Backward) if schedule.training else (Forward,)
    cells = _rows(
        kind(cell, segment)
        for stage in range(grid.num_stages)
        for cell in grid.cells(stage)
        for segment in range(schedule.segments(cell))
        for kind in kinds
    )
    sums = _rows(
        reduce
        for stage, units in enumerate(schedule.units if schedule.training else ())
        for index in range(len(units))
        for reduce in reductions(schedule, UnitKey(stage, index))
    )
    messages = transfers(schedule, cells)
    return np.concatenate([cells, messages.receives, messages.sends, sums])


def _rows(actions: Iterable[Action]) -> Columns:
    return np.array([encode(action) for action in actions], np.int64).reshape(-1, 6)


def _check_places(schedule: Schedule, programs: Programs) -> None:
    """Every action speaks of a cell or a unit that exists, on a stage of its rank."""
    for rank, actions in enumerate(programs):
        for position, action in enumerate(actions):
            here = f"rank {rank}, position {position}: {action}"
            if isinstance(action, Gather | Release | Reduce):
                stage, exists = action.unit.stage, _has_unit(schedule, action.unit)
            else:
                stage, exists = action.cell.stage, action.cell in schedule.grid
            if not exists:
                raise ScheduleError(f"{here} is of a cell or unit that this schedule does not have")
            if schedule.grid.rank_of(stage) != rank:
                raise ScheduleError(f"{here} is of stage {stage}, which is not on this rank")


def _has_unit(schedule: Schedule, unit: UnitKey) -> bool:
    return 0 <= unit.stage < len(schedule.units) and 0 <= unit.index < len(
        schedule.units[unit.stage]
    )


def _check_ties(schedule: Schedule) -> None:
    """A tie is a sum between two ranks, so both must have exactly one unit in it."""
    tied = [s for s, units in enumerate(schedule.units) for u in units if "tie" in u.reductions]
    ends = [0, schedule.grid.num_stages - 1]
    if tied and (tied != ends or len({schedule.grid.rank_of(stage) for stage in ends}) == 1):
        raise ScheduleError(
            f"units of stages {tied} are tied; a tie is between one unit of the first and one of"
            " the last stage, on two ranks"
        )


def _check_complete(schedule: Schedule, programs: Programs) -> None:
    work = [a for actions in programs for a in actions if not isinstance(a, Gather | Release)]
    wanted, present = expected(schedule), _rows(work)
    index = Index(np.concatenate([wanted, present]))
    have, want = index.keys(present), index.keys(wanted)
    for extra in np.flatnonzero(~np.isin(have, want))[:1]:
        raise ScheduleError(
            f"{work[extra]} is in the schedule, but the grid has no such work; {_WORK}"
        )
    for lost in np.flatnonzero(~np.isin(want, have))[:1]:
        raise ScheduleError(f"{decode(tuple(wanted[lost].tolist()))} is missing; {_WORK}")
    key, count = Counter(have.tolist()).most_common(1)[0]
    if count > 1:
        raise ScheduleError(f"{work[have.tolist().index(key)]} is done {count} times; {_WORK}")


_WORK = "every cell, every transfer between ranks and every reduction must be there exactly once"


def _check_order(program: Program) -> None:
    """On one rank, nothing stands before what it needs."""
    here = program.rank[program.action] == program.rank[program.need]
    for edge in np.flatnonzero(here & (program.need > program.action))[:1]:
        action, need = int(program.action[edge]), int(program.need[edge])
        raise ScheduleError(
            f"{program.place(action)} needs {program.at(need)}, which comes later on the same rank"
        )


def _check_pairs(schedule: Schedule, programs: Programs) -> None:
    """What is issued together with a send is a receive from the rank it goes to."""
    rank_of = schedule.grid.rank_of
    for rank, actions in enumerate(programs):
        for position, action in enumerate(actions):
            if not isinstance(action, Send) or not action.paired:
                continue
            match actions[position + 1 : position + 2]:
                case [Receive(_, source)] if rank_of(source) == rank_of(action.to):
                    pass
                case _:
                    raise ScheduleError(
                        f"rank {rank}, position {position}: {action} is paired, but no receive from"
                        f" rank {rank_of(action.to)} follows; pair it with one, or drop the &"
                    )


def _check_channels(schedule: Schedule, programs: Programs) -> None:
    """Between two ranks, what is sent is what is asked for next."""
    sent: dict[Channel, list[Send]] = {}
    asked: dict[Channel, list[Receive]] = {}
    rank_of = schedule.grid.rank_of
    for rank, actions in enumerate(programs):
        for action in actions:
            match action:
                case Send():
                    sent.setdefault((rank, rank_of(action.to), action.way), []).append(action)
                case Receive():
                    channel = (rank_of(action.source), rank, action.way)
                    asked.setdefault(channel, []).append(action)
                case _:
                    pass
    for channel, sends in sent.items():
        for send, receive in zip(sends, asked[channel], strict=True):
            if receive != send.receive():
                raise ScheduleError(
                    f"rank {channel[0]} sends {send} when rank {channel[1]} asks for {receive}:"
                    " both ranks must name the cells of a channel in the same order"
                )
