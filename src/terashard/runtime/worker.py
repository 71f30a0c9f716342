"""Performs a schedule: one rank's list of actions, over its stages, units and groups.

The worker knows no order's name: it does what the list says, in the order in which the list says it. Receives are
posted ahead of their turn, so that a message travels while the rank computes; sends are waited for at the end of the
step; a unit is waited for at its first use. Every action leaves a span of time.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import torch
from torch import Tensor

from terashard.comm.group import Work
from terashard.comm.mesh import Mesh
from terashard.errors import CommunicationError, ScheduleError
from terashard.runtime.stage import Stage
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
from terashard.schedule.needs import units_used
from terashard.schedule.schedule import Schedule
from terashard.shard.unit import ShardUnit
from terashard.simulate.timeline import Span, Timeline

AHEAD = 2
"""Receives of one direction that are posted before their turn."""


@dataclass(slots=True)
class _Mail:
    """The receives of one direction in program order: those posted, and how many."""

    actions: list[Receive] = field(default_factory=list)
    posted: dict[Receive, tuple[Tensor, Work]] = field(default_factory=dict)
    next: int = 0


class Worker:
    """One rank that performs its part of a schedule.

    ``stages`` and ``units`` are those of this rank, by stage.
    """

    def __init__(
        self, mesh: Mesh, stages: Mapping[int, Stage], units: Mapping[int, Sequence[ShardUnit]]
    ) -> None:
        self.mesh, self.stages, self.units = mesh, stages, units
        self.rank = mesh.coordinates.stage
        self._schedule: Schedule | None = None
        self._program: list[Action] = []
        self._mail: dict[bool, _Mail] = {}
        self._sends: list[tuple[Send, Work]] = []
        self._values: dict[tuple[Cell, bool], Tensor | None] = {}

    def run(self, schedule: Schedule, tokens: Tensor, targets: Tensor, scale: float) -> Timeline:
        """Perform one step on ``tokens`` and ``targets`` [S, N]; the loss is the sum over tokens times ``scale``.

        Afterwards every stage has its ``loss_sum``, and, in training, every unit its reduced gradients.
        """
        self._begin(schedule, tokens, targets, scale)
        spans: list[Span] = []
        started = time.perf_counter()
        for position, action in enumerate(self._program):
            before = time.perf_counter()
            self._guarded(position, action, self._perform)
            spans.append(Span(self.rank, action, before - started, time.perf_counter() - started))
        self._end(schedule)
        return Timeline(tuple(spans))

    def _begin(self, schedule: Schedule, tokens: Tensor, targets: Tensor, scale: float) -> None:
        if schedule is not self._schedule:
            self._schedule, self._program = schedule, list(schedule.actions(self.rank))
        self._values.clear()
        self._sends.clear()
        for index, stage in self.stages.items():
            stage.begin(schedule, tokens, targets, scale)
            for unit in self.units[index] if schedule.training else ():
                unit.zero_gradients()
        self._mail = {True: _Mail(), False: _Mail()}
        for action in self._program:
            if isinstance(action, Receive):
                self._mail[action.source < action.cell.stage].actions.append(action)
        for mail in self._mail.values():
            self._post(mail)

    def _end(self, schedule: Schedule) -> None:
        for send, work in self._sends:
            self._guarded(len(self._program), send, lambda _, work=work: work.wait())  # type: ignore[misc]
        self._sends.clear()
        for units in self.units.values() if schedule.training else ():
            for unit in units:
                unit.wait_reduced()

    def _guarded(self, position: int, action: Action, act: Callable[[Action], None]) -> None:
        """Say who waited for what when a peer is gone."""
        try:
            act(action)
        except CommunicationError as cause:
            raise CommunicationError(
                f"{self.mesh}, position {position}: {self._doing(action)} failed: {cause}"
            ) from cause

    def _doing(self, action: Action) -> str:
        match action:
            case Receive(cell, source):
                what = "the activation" if source < cell.stage else "the gradient"
                return f"{action}, which waits for {what} of cell {cell} from {self._neighbour(source)},"
            case Send(cell, to):
                return f"{action}, which sends what cell {cell} made to {self._neighbour(to)},"
            case _:
                return str(action)

    def _neighbour(self, stage: int) -> str:
        here, rank = self.mesh.coordinates, self.mesh.down.ranks[self._grid_rank(stage)]
        return f"rank {rank} (replica {here.replica}, stage {stage}, shard {here.shard})"

    def _perform(self, action: Action) -> None:
        match action:
            case Forward(cell):
                self._wait_for_units(action, cell.stage)
                x = self._values.pop((cell, True), None) if action.segment == 0 else None
                self._pass_on(cell, self.stages[cell.stage].forward(action, x), forward=True)
            case Backward(cell):
                self._wait_for_units(action, cell.stage)
                dy = self._values.pop((cell, False), None)
                self._pass_on(cell, self.stages[cell.stage].backward(action, dy), forward=False)
            case Send(cell, to):
                self._send(action, cell, to)
            case Receive(cell, source):
                self._values[cell, source < cell.stage] = self._receive(action)
            case Gather(unit):
                self._unit(unit).gather()
            case Release(unit):
                self._unit(unit).wait()
                self._unit(unit).release()
            case Reduce(unit, over):
                self._unit(unit).reduce(over)
            case _:
                assert_never(action)

    def _pass_on(self, cell: Cell, made: Tensor | None, *, forward: bool) -> None:
        """Keep what a cell made under the cell that wants it: the same slice on the next stage, or the one before."""
        if made is not None:
            there = Cell(cell.stage + (1 if forward else -1), cell.micro, cell.slice)
            self._values[there, forward] = made

    def _send(self, action: Send, cell: Cell, to: int) -> None:
        forward = to > cell.stage
        value = self._values.pop((Cell(to, cell.micro, cell.slice), forward), None)
        if value is None:
            raise ScheduleError(f"{self.mesh}: {action} has nothing to send; check the schedule")
        group = self.mesh.down if forward else self.mesh.up
        work = group.send(value.contiguous(), self._grid_rank(to))
        self._sends.append((action, work))

    def _receive(self, action: Receive) -> Tensor:
        mail = self._mail[action.source < action.cell.stage]
        if action not in mail.posted:
            self._post(mail)
        buffer, work = mail.posted.pop(action)
        work.wait()
        self._post(mail)
        return buffer

    def _post(self, mail: _Mail) -> None:
        while len(mail.posted) < AHEAD and mail.next < len(mail.actions):
            action = mail.actions[mail.next]
            stage = self.stages[action.cell.stage]
            shape = stage.input_shape(action.cell)
            buffer = torch.empty(shape, dtype=stage.dtype, device=stage.device)
            group = self.mesh.down if action.source < action.cell.stage else self.mesh.up
            work = group.receive(buffer, self._grid_rank(action.source))
            mail.posted[action] = buffer, work
            mail.next += 1

    def _wait_for_units(self, action: Forward | Backward, stage: int) -> None:
        assert self._schedule is not None
        units = self.units[stage]
        for index in units_used(self._schedule, action):
            units[index].wait()
            for lender in units[index].lenders:
                lender.wait()

    def _unit(self, key: UnitKey) -> ShardUnit:
        return self.units[key.stage][key.index]

    def _grid_rank(self, stage: int) -> int:
        assert self._schedule is not None
        return self._schedule.grid.rank_of(stage)
