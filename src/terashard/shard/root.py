r"""What the units of one tree of sharded modules share: slots, order, the end of a backward pass.

The first module that runs forward outside any other is the root. From then on, its units

* lie in slots (``slots.py``);
* are gathered and summed in an order on which all ranks agree (``order.py``);
* are finished together when the backward pass ends: sums that are still owed are issued, finished,
  and put into ``.grad``.

A unit's gradient is final in a backward pass when all its leaves have theirs, or when the
gradients of its inputs are computed; what is not final by then is at the end of the pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from terashard.comm.board import Board
from terashard.errors import RunError
from terashard.shard.module_unit import ModuleUnit
from terashard.shard.residence import UnitState
from terashard.shard.rules import Pool
from terashard.shard.slots import Slots
from terashard.shard.turn import Turn


class Root:
    """The units of one tree, in the order of registration."""

    def __init__(
        self,
        units: Sequence[ModuleUnit],
        parents: Mapping[str, Sequence[str]],
        pool: Pool,
    ) -> None:
        self.units = tuple(units)
        self.is_in_forward = False
        self.is_in_backward = False
        self.ahead = 1 if any(unit.axes.device.type != "cpu" for unit in self.units) else 0
        """Gathers that are issued before their unit's turn; on a CPU nothing hides behind them."""
        self.shardings: list[Any] = []
        self._flying: deque[ModuleUnit] = deque()
        self._done: set[ModuleUnit] = set()
        self.turn = Turn(self.units, parents, _board(self.units))
        self._has_begun = False
        self._has_waiting = False
        """Whether gradients of earlier passes waited when the present backward pass began."""
        above = {name for names in parents.values() for name in names}
        self.slots = Slots(self.units, above, pool, self.turn.distance)
        for unit in self.units:
            unit.on_arrival = partial(self._arrived, unit)

    # ---- parameters -----------------------------------------------------------------------------

    def bring(self, unit: ModuleUnit, phase: str, *, ahead: bool = False) -> None:
        """Issue the gather of ``unit`` and of those it borrows from, unless they are there.

        ``ahead``: it is not used yet.
        """
        for one in (*unit.lenders, unit):
            passed_by = self.turn.reach(one, phase, ahead=ahead)
            if phase == "backward":
                for late in self.turn.overdue(one):
                    late.landing.collect()
                    self._sum(late)
            for passed in passed_by:
                self._take_part(passed)
            if not one.is_there:
                self._gather(one)
                self._free_slots()

    def look_ahead(self, phase: str) -> None:
        """Issue the gathers that are due next, as far as no unit in use would have to go."""
        for _ in range(self.ahead):
            unit = self.turn.coming(phase)
            if unit is None or unit.is_there or unit.stays:
                return
            if self.slots.would_push_out(unit):
                return
            self.bring(unit, phase, ahead=True)

    def show(self, unit: ModuleUnit) -> None:
        """Finish the gather of ``unit`` and of those it borrows from."""
        with self.turn.explained():
            for one in (*unit.lenders, unit):
                one.present(unit)

    def _free_slots(self) -> None:
        """Give memory back once no other gather is due in a backward pass: sums need it now."""
        if self.is_in_backward and self.turn.coming("backward") is None:
            self.slots.free(is_over=False)

    def _gather(self, unit: ModuleUnit) -> None:
        self.turn.announce("gathers", unit)
        if unit.state is not UnitState.SHARDED:
            unit.drop()
        unit.gather(self.slots.take(unit, in_backward=self.is_in_backward))

    # ---- forward --------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward pass of the whole tree begins; what an aborted pass left is cleared away."""
        if self.is_in_backward:
            self._abandon_backward()
        elif self.is_in_forward:
            self._drop_all()
        self.let_go(self.units)
        self.slots.set_apart()
        if not self._has_begun:
            self._has_begun = True
            self.turn.agree_on_values()
        self.is_in_forward = True
        self.turn.begin("forward")

    def let_go(self, units: Sequence[ModuleUnit]) -> None:
        """Before a forward pass: what is full by chance may be of old values; nothing tells."""
        for unit in units:
            if not unit.is_active and not unit.stays:
                unit.drop()

    def end_forward(self) -> None:
        """The forward pass has ended: take part in the gathers that this rank did not need."""
        for passed in self.turn.rest("forward"):
            self._take_part(passed)
        self.turn.compare("forward")
        self.is_in_forward = False
        if not torch.is_grad_enabled():
            for unit in self.units:
                if not unit.stays or unit.rules.is_default:
                    unit.drop()

    def _take_part(self, unit: ModuleUnit) -> None:
        if not unit.is_there:
            self._gather(unit)
            with self.turn.explained():
                unit.wait()
            unit.hide()

    # ---- backward -------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Called by the first unit that a backward pass reaches."""
        if self.is_in_backward:
            return
        self.is_in_backward = True
        self._has_waiting = any(unit.landing.waits or unit.landing.carries for unit in self.units)
        self.turn.begin("backward")
        for sharding in self.shardings:
            sharding.forget_backward()
        for unit in self.units:
            unit.arrived.clear()
        torch.autograd.Variable._execution_engine.queue_callback(_End(self))

    def ready(self, unit: ModuleUnit) -> None:
        """The gradient of ``unit`` is final in this backward pass, and nobody reads it any more."""
        if not unit.rules.reshard_after_backward:
            unit.holders.clear()
        else:
            unit.hide()
        if unit in self._done or not unit.landing.collect():
            return
        if unit.rules.sums:
            self._done.add(unit)
            due = self.turn.ready(unit)
            self._free_slots()
            for following in due:
                self._sum(following)

    def end_backward(self) -> None:
        """Issue the sums that are owed, finish all, publish gradients, clear away."""
        for passed in self.turn.rest("backward"):
            self._take_part(passed)
        for unit in self.units:
            unit.landing.collect()
        for unit in self.turn.owed():
            self._land_all()
            self.slots.free(is_over=True)
            self._sum(unit)
        self._land_all()
        with self.turn.explained():
            self._publish()
        self.turn.compare("backward")
        for unit in self.units:
            if unit.rules.reshard_after_backward:
                unit.drop()
            for use in [use for use in unit.uses if use.is_reached]:
                unit.uses.discard(use)
        self._done = set()
        self.is_in_backward = False

    def break_off(self) -> None:
        """A backward pass raised: the DTensors stand in the modules, whatever comes next."""
        for unit in self.units:
            unit.holders.clear()
            unit.hide()

    def abandon(self) -> None:
        """Clear away what a pass that raised left behind; gradients that wait are lost."""
        self._drop_all()
        for unit in self.units:
            unit.landing.forget()
            unit.uses.clear()
        for sharding in self.shardings:
            sharding.forget_backward()
        self._flying.clear()
        self._done = set()
        self.is_in_backward = False
        self.turn.reset()

    def _abandon_backward(self) -> None:
        """A backward pass was broken off: what waited is mixed up with what it had made."""
        had, self._has_waiting = self._has_waiting, False
        self.abandon()
        if had:
            raise RunError(
                "a backward pass was broken off, and gradients of earlier passes that waited for"
                " their sum are lost with it; call zero_grad() and begin the accumulation again, or"
                " call reset_iter_state() after a pass that raised to go on without them"
            )

    def _drop_all(self) -> None:
        """A forward pass was broken off; gradients that wait, and graphs, are as they were."""
        for unit in self.units:
            unit.drop()
        self.is_in_forward = False

    def _sum(self, unit: ModuleUnit) -> None:
        with self.turn.explained():
            while len(self._flying) >= unit.rules.max_flying:
                self._flying.popleft().landing.issue_replicas()
        self.turn.announce("sums", unit)
        unit.landing.issue()
        self._flying.append(unit)

    def _land_all(self) -> None:
        with self.turn.explained():
            while self._flying:
                self._flying.popleft().landing.issue_replicas()

    def _publish(self) -> None:
        for unit in self.units:
            unit.landing.exchange_sparse()
        told = self.turn.told_of(self.units)
        for unit in self.units:
            if unit.landing.is_flying:
                unit.landing.publish(told)
        late = [unit for unit in self.units if unit in told.late]
        for unit in late:
            unit.landing.issue()
            unit.landing.issue_replicas()
        if late:
            told = self.turn.told_of(late)
            for unit in late:
                unit.landing.publish(told)

    def _arrived(self, unit: ModuleUnit) -> None:
        """A gradient of ``unit`` is complete."""
        if self.is_in_backward and unit.has_all_gradients:
            self.ready(unit)


class _End:
    """What autograd calls at the end of a backward pass, and drops if the pass raises."""

    def __init__(self, root: Root) -> None:
        self._root: Root | None = root

    def __call__(self) -> None:
        assert self._root is not None
        self._root.end_backward()
        self._root = None

    def __del__(self) -> None:
        if self._root is not None:
            self._root.break_off()


def _board(units: Sequence[ModuleUnit]) -> Board | None:
    """Where the ranks of all units talk; None if this rank is alone."""
    ranks = sorted({rank for unit in units for rank in unit.ranks})
    return Board.here(ranks) if len(ranks) > 1 else None
