"""Performs a schedule: one rank's list of actions, over its stages, units and groups.

The worker knows no order's name: it does what the list says, in the order in which the list says
it. Every action leaves a span of time.

A step that fails may leave messages on their way, half of a sum, a unit gathered. So a worker among
others refuses to go on after it; one that is alone puts its units back and may try again.
"""

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NoReturn, assert_never

import torch
from torch import Tensor

from terashard.comm.mesh import Mesh
from terashard.errors import CommunicationError, RunError
from terashard.nn.loss import Loss
from terashard.runtime.mail import Mail
from terashard.runtime.part import Part
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
    Way,
)
from terashard.schedule.schedule import Schedule
from terashard.shard.places import Places
from terashard.shard.sums import Sums
from terashard.shard.unit import ShardUnit, UnitState
from terashard.simulate.timeline import Span, Timeline


class Worker:
    """One rank that performs its part of a schedule.

    ``stages`` and ``units`` are those of this rank, by stage. ``places`` has the slots of units
    that move between them.
    """

    def __init__(
        self,
        mesh: Mesh,
        stages: Mapping[int, Stage],
        units: Mapping[int, Sequence[ShardUnit]],
        places: Places | None = None,
    ) -> None:
        self.mesh, self.stages, self.units = mesh, stages, units
        self._places = places
        self.rank = mesh.coordinates.stage
        self._parts: dict[bool, Part] = {}
        self._sums = Sums()
        self._values: dict[tuple[Cell, Way], Tensor] = {}
        self._failure: str | None = None

    def run(self, schedule: Schedule, tokens: Tensor, targets: Tensor, loss: Loss) -> Timeline:
        """Perform one step on ``tokens`` and ``targets`` [S, N] under ``loss``.

        Afterwards every stage has its ``loss_sum``, and, in training, every unit its reduced
        gradients. Raises ``CommunicationError`` that says who waited for what; anything else that
        a module raises passes through, with a note that says where it happened.
        """
        if self._failure is not None:
            raise RunError(
                f"{self.mesh}: an earlier step failed at {self._failure}, and messages of it may"
                " still be on their way; start again from the last checkpoint"
            )
        part = self._part(schedule)
        try:
            mail = self._begin(part, tokens, targets, loss)
            timeline = self._perform_all(part, mail)
            self._end(part, mail)
        except BaseException:
            self._recover()
            raise
        finally:
            self._forget()
        return timeline

    def _part(self, schedule: Schedule) -> Part:
        """This rank's part of ``schedule``, read off when it changes."""
        part = self._parts.get(schedule.training)
        if part is None or part.schedule is not schedule:
            part = self._parts[schedule.training] = Part.of(schedule, self.rank)
        return part

    def _begin(self, part: Part, tokens: Tensor, targets: Tensor, loss: Loss) -> Mail:
        self._failure = "its beginning"  # until its end is reached
        self._sums = Sums()
        for stage in self.stages.values():
            stage.begin(part.schedule, tokens, targets, loss)
        for key in part.trained:
            self._unit(key).zero_gradients()
        return Mail(part, self.mesh, self._new_buffer)

    def _perform_all(self, part: Part, mail: Mail) -> Timeline:
        position, clock = 0, time.perf_counter
        marks = [clock()]
        try:
            for position, action in enumerate(part.actions):
                for key in part.first_uses[position]:
                    self._wait_for(self._unit(key))
                self._perform(action, mail)
                marks.append(clock())
        except Exception as error:
            self._explain(error, f"position {position}", part.actions[position])
        times = pairwise(mark - marks[0] for mark in marks)
        spans = (Span(self.rank, a, *when) for a, when in zip(part.actions, times, strict=True))
        return Timeline(tuple(spans))

    def _perform(self, action: Action, mail: Mail) -> None:
        match action:
            case Forward(cell):
                x = self._values.pop((cell, "down"), None) if action.segment == 0 else None
                self._pass_on(cell, self.stages[cell.stage].forward(action, x), forward=True)
            case Backward(cell):
                dy = self._values.pop((cell, "up"), None)
                self._pass_on(cell, self.stages[cell.stage].backward(action, dy), forward=False)
            case Send():
                there = action.receive().cell
                mail.send(action, self._values.pop((there, action.way)))
            case Receive(cell):
                self._values[cell, action.way] = mail.receive(action)
            case Gather(unit):
                here = self._unit(unit)
                here.gather(None if self._places is None else self._places.free(here))
            case Release(unit):
                self._unit(unit).wait()
                self._unit(unit).release()
            case Reduce(unit, over):
                self._sums.reduce(self._unit(unit), over)
            case _:
                assert_never(action)

    def _pass_on(self, cell: Cell, made: Tensor | None, *, forward: bool) -> None:
        """Keep what a cell made under the cell that wants it, on the stage after or before."""
        if made is not None:
            there = Cell(cell.stage + (1 if forward else -1), cell.micro, cell.slice)
            self._values[there, "down" if forward else "up"] = made

    def _end(self, part: Part, mail: Mail) -> None:
        for send, work in mail.unfinished():
            try:
                work.wait()
            except Exception as error:
                self._explain(error, "end of the step", send)
        for key in part.trained:
            try:
                self._sums.settle(self._unit(key))
                self._unit(key).wait_reduced()
            except Exception as error:
                self._explain(error, "end of the step", Reduce(key))
        self._failure = None

    def _recover(self) -> None:
        """Alone, nothing is on its way: put the units back, and the next step may begin."""
        if self.mesh.world.size > 1:
            return
        for unit in (unit for units in self.units.values() for unit in units):
            if unit.gradients is not None:
                unit.wait_reduced()
            if unit.state is not UnitState.SHARDED:
                unit.wait()
                unit.release()
        self._failure = None

    def _forget(self) -> None:
        self._values.clear()
        for stage in self.stages.values():
            stage.end()

    def _new_buffer(self, cell: Cell) -> Tensor:
        stage = self.stages[cell.stage]
        return torch.empty(stage.input_shape(cell), dtype=stage.dtype, device=stage.device)

    def _wait_for(self, unit: ShardUnit) -> None:
        for each in (unit, *unit.lenders):
            each.wait()

    def _unit(self, key: UnitKey) -> ShardUnit:
        return self.units[key.stage][key.index]

    def _explain(self, error: Exception, place: str, action: Action) -> NoReturn:
        """Raise ``error`` with the place where it happened, and who waited for whom."""
        self._failure = f"{place}, {action}"
        here = f"{self.mesh}, {place}"
        if isinstance(error, CommunicationError):
            raise CommunicationError(f"{here}: {self._doing(action)} failed: {error}") from error
        error.add_note(f"{here}: this happened in {action}")
        raise error

    def _doing(self, action: Action) -> str:
        match action:
            case Receive(cell, source):
                what = "the activation" if action.way == "down" else "the gradient"
                peer = self._neighbour(source)
                return f"{action}, which waits for {what} of cell {cell} from {peer},"
            case Send(cell, to):
                return f"{action}, which sends what cell {cell} made to {self._neighbour(to)},"
            case _:
                return str(action)

    def _neighbour(self, stage: int) -> str:
        grid = next(part.schedule.grid for part in self._parts.values())
        return self.mesh.name_of(self.mesh.down.ranks[grid.rank_of(stage)])
