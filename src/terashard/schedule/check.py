"""Refuses a schedule that would hang, lose work, compute with parameters that are not there, or mix up a channel.

What is proved of a schedule that passes:

1. every cell, transfer and reduction that the grid asks for is there exactly once, on the right
rank, and nothing else;
2. on every rank, each action stands behind all that it needs there;
3. parameters are full whenever they are read, gathered only when not full, released at the end,
and every gradient
   contribution is summed exactly once;
4. every channel delivers in the order in which its receiver asks;
5. all ranks come to the end, under the stated assumption on sends: ``buffered`` (a send returns
at once) or ``blocking``
   (a send returns when the receiver stands at the matching receive).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, NoReturn, TypeAlias

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
    decode,
    encode,
)
from terashard.schedule.compile import Index, Program, compile_schedule
from terashard.schedule.needs import reduction_before, units_fed, units_used
from terashard.schedule.schedule import Schedule

Sends: TypeAlias = Literal["buffered", "blocking"]


def check(schedule: Schedule, *, sends: Sends = "buffered") -> Program:
    """Return ``schedule`` compiled if it is right; raise ``ScheduleError`` with a sentence if it is not."""
    _check_places(schedule)
    _check_complete(schedule)
    program = compile_schedule(schedule)
    _check_order(program)
    for rank, actions in enumerate(schedule):
        _Residency(schedule, rank).check(actions)
    _check_channels(schedule)
    _check_ends(schedule, program, sends)
    return program


def expected(schedule: Schedule) -> Iterator[Action]:
    """Every action that must be there exactly once: cells, the transfers between them, reductions."""
    grid = schedule.grid
    for stage in range(grid.num_stages):
        for cell in grid.cells(stage):
            yield from _cell_actions(schedule, cell)
    for stage, units in enumerate(schedule.units if schedule.training else ()):
        for index, unit in enumerate(units):
            yield from (Reduce(UnitKey(stage, index), over) for over in unit.reductions)


def _cell_actions(schedule: Schedule, cell: Cell) -> Iterator[Action]:
    grid, segments = schedule.grid, range(schedule.segments(cell))
    yield from (Forward(cell, k) for k in segments)
    if schedule.training:
        yield from (Backward(cell, k) for k in segments)
    after = cell.stage + 1
    if after < grid.num_stages and grid.rank_of(after) != grid.rank_of(cell.stage):
        there = cell._replace(stage=after)
        yield from (Send(cell, after), Receive(there, cell.stage))
        if schedule.training:
            yield from (Send(there, cell.stage), Receive(cell, after))


def _check_places(schedule: Schedule) -> None:
    """Every action belongs to a stage of its rank and a unit that exists."""
    if schedule.units and len(schedule.units) != schedule.grid.num_stages:
        raise ScheduleError(
            f"units are listed for {len(schedule.units)} stages, but there are {schedule.grid.num_stages}"
        )
    for rank, actions in enumerate(schedule):
        for position, action in enumerate(actions):
            stage = (
                action.unit.stage
                if isinstance(action, Gather | Release | Reduce)
                else action.cell.stage
            )
            here = f"rank {rank}, position {position}: {action}"
            if stage >= schedule.grid.num_stages or schedule.grid.rank_of(stage) != rank:
                raise ScheduleError(f"{here} is of stage {stage}, which is not on this rank")
            if isinstance(action, Gather | Release | Reduce):
                units = len(schedule.units[stage]) if schedule.units else 0
                if action.unit.index >= units:
                    raise ScheduleError(
                        f"{here} names unit {action.unit.index}, but the stage has {units} units"
                    )


def _check_complete(schedule: Schedule) -> None:
    wanted = np.array([encode(a) for a in expected(schedule)], np.int64).reshape(-1, 6)
    rows = [
        encode(a) for actions in schedule for a in actions if not isinstance(a, Gather | Release)
    ]
    present = np.array(rows, np.int64).reshape(-1, 6)
    index = Index(np.concatenate([wanted, present]))
    have, want = index.keys(present), index.keys(wanted)
    for extra in np.flatnonzero(~np.isin(have, want))[:1]:
        raise ScheduleError(
            f"{decode(rows[extra])} is in the schedule, but the grid has no such work; {_WORK}"
        )
    for lost in np.flatnonzero(~np.isin(want, have))[:1]:
        raise ScheduleError(f"{decode(tuple(wanted[lost].tolist()))} is missing; {_WORK}")
    for key, count in Counter(have.tolist()).items():
        if count > 1:
            action = decode(rows[have.tolist().index(key)])
            raise ScheduleError(f"{action} is done {count} times; {_WORK}")


_WORK = "every cell, every transfer between ranks and every reduction must be there exactly once"


def _check_order(program: Program) -> None:
    """On one rank, nothing stands before what it needs."""
    wrong = (program.rank[program.action] == program.rank[program.need]) & (
        program.need > program.action
    )
    for edge in np.flatnonzero(wrong)[:1]:
        action, need = int(program.action[edge]), int(program.need[edge])
        raise ScheduleError(
            f"{program.place(action)} needs {program.at(need)}, which comes later on the same rank"
        )


class _Residency:
    """Folds one rank's actions over the state of its units: full or not, fed or summed."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self.full: set[UnitKey] = set()
        self.summed: dict[UnitKey, set[str]] = {}
        self.here = ""

    def check(self, actions: Sequence[Action]) -> None:
        """Walk the program; refuse at the first fault."""
        if not self.schedule.units:
            return
        for position, action in enumerate(actions):
            self.here = f"rank {self.rank}, position {position}: {action}"
            self._step(action)
        for unit in sorted(self.full):
            raise ScheduleError(f"rank {self.rank}: unit {unit} is gathered but never released")

    def _step(self, action: Action) -> None:
        match action:
            case Gather(unit):
                if unit in self.full:
                    self._refuse("gathers a unit that is full already")
                self.full.add(unit)
            case Release(unit):
                if unit not in self.full:
                    self._refuse("releases a unit that is not full")
                self.full.remove(unit)
            case Reduce(unit, over):
                self._reduce(unit, over)
            case Forward(cell) | Backward(cell):
                self._compute(action, cell.stage)
            case Send() | Receive():
                pass

    def _reduce(self, unit: UnitKey, over: str) -> None:
        reductions = self.schedule.units[unit.stage][unit.index].reductions
        before = next((reduction_before(o, reductions) for o in reductions if o == over), None)
        done = self.summed.setdefault(unit, set())
        if before is not None and before not in done:
            self._refuse(f"sums over {over} before the sum over {before} is done")
        done.add(over)

    def _compute(self, action: Action, stage: int) -> None:
        for index in units_used(self.schedule, action):
            if UnitKey(stage, index) not in self.full:
                self._refuse(f"reads unit {stage}:{index}, which is not gathered then")
        for index in units_fed(self.schedule, action):
            if UnitKey(stage, index) in self.summed:
                self._refuse(f"adds to the gradient of unit {stage}:{index} after it was reduced")

    def _refuse(self, why: str) -> NoReturn:
        raise ScheduleError(f"{self.here} {why}")


Channel: TypeAlias = tuple[int, int, bool]


def _check_channels(schedule: Schedule) -> None:
    """From one rank to another, activations (and gradients) arrive in the order in which they are asked for."""
    sent: dict[Channel, list[Send]] = {}
    asked: dict[Channel, list[Receive]] = {}
    rank_of = schedule.grid.rank_of
    for actions in schedule:
        for action in actions:
            match action:
                case Send(cell, to):
                    sent.setdefault((rank_of(cell.stage), rank_of(to), to > cell.stage), []).append(
                        action
                    )
                case Receive(cell, source):
                    channel = (rank_of(source), rank_of(cell.stage), source < cell.stage)
                    asked.setdefault(channel, []).append(action)
                case _:
                    pass
    for channel, sends in sent.items():
        for send, receive in zip(sends, asked[channel], strict=True):
            if (send.cell.micro, send.cell.slice) != (receive.cell.micro, receive.cell.slice):
                raise ScheduleError(
                    f"rank {channel[0]} sends {send} when rank {channel[1]} asks for {receive}:"
                    " both ranks must name the cells of a channel in the same order"
                )


def _check_ends(schedule: Schedule, program: Program, sends: Sends) -> None:
    """Run the actions of all ranks, each in its order, as far as they come."""
    run = _Run(schedule, program, sends)
    while run.advance():
        pass
    stuck = [run.waiting(rank) for rank in range(schedule.grid.ranks) if not run.ended(rank)]
    if stuck:
        raise ScheduleError(f"with {sends} sends this schedule never ends: " + "; ".join(stuck))


class _Run:
    """The state of a run: what every rank has issued, and what is done."""

    def __init__(self, schedule: Schedule, program: Program, sends: Sends) -> None:
        self.program, self.blocking = program, sends == "blocking"
        self.offsets = program.offsets.tolist()
        self.pointer = self.offsets[:-1].copy()
        self.done = bytearray(len(program))
        self.issued = bytearray(len(program))
        self.actions = [program.at(i) for i in range(len(program))]
        self.partner = self._partners()
        self.needs: list[list[int]] = [[] for _ in self.actions]
        across = program.rank[program.action] != program.rank[program.need]
        for action, need in zip(
            program.action[across].tolist(), program.need[across].tolist(), strict=True
        ):
            self.needs[action].append(need)

    def _partners(self) -> dict[int, tuple[int, ...]]:
        """Positions that must be issued before an action can end: the other side of a transfer, or of a tied sum."""
        partner: dict[int, tuple[int, ...]] = {}
        for action, need in zip(
            self.program.action.tolist(), self.program.need.tolist(), strict=True
        ):
            if isinstance(self.actions[action], Receive):
                partner[action], partner[need] = (need,), (action,)
        ties = [i for i, a in enumerate(self.actions) if isinstance(a, Reduce) and a.over == "tie"]
        return partner | {i: tuple(t for t in ties if t != i) for i in ties}

    def ended(self, rank: int) -> bool:
        """Whether ``rank`` has done everything."""
        return bool(self.pointer[rank] == self.offsets[rank + 1])

    def advance(self) -> bool:
        """Let every rank go on as far as it can; whether any did."""
        return any([self._advance(rank) for rank in range(len(self.pointer))])

    def _advance(self, rank: int) -> bool:
        moved = False
        while not self.ended(rank):
            group = self._issue(rank)
            if not all(self._finish(position) for position in group):
                break
            self.pointer[rank] += len(group)
            moved = True
        return moved

    def _issue(self, rank: int) -> range:
        first = self.pointer[rank]
        action = self.actions[first]
        pair = self.blocking and isinstance(action, Send) and action.paired
        group = range(first, min(first + 1 + pair, self.offsets[rank + 1]))
        for position in group:
            self.issued[position] = 1
        return group

    def _finish(self, position: int) -> bool:
        if not self.done[position]:
            self.done[position] = self._can_finish(position)
        return bool(self.done[position])

    def _can_finish(self, position: int) -> bool:
        match self.actions[position]:
            case Send() if not self.blocking:
                return True
            case Send() | Receive() | Reduce(over="tie"):
                return all(self.issued[other] for other in self.partner.get(position, ()))
            case _:
                return all(self.done[need] for need in self.needs[position])

    def waiting(self, rank: int) -> str:
        """What ``rank`` waits for, as a clause."""
        position = next(p for p in self._issue(rank) if not self._finish(p))
        others = [p for p in self.partner.get(position, ()) if not self.issued[p]]
        others += [p for p in self.needs[position] if not self.done[p]]
        return f"{self.program.place(position)} waits for {self.program.at(others[0])}"
