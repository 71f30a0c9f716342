r"""What the units of one tree of sharded modules share: slots, order, the end of a backward pass.

The first module that runs forward outside any other is the root. From then on, its units

* lie in slots: a unit that stays full, and one that has other units below it, in one of its own;
  the others take turns in ``ALTERNATING`` slots, in the order in which they were registered;
* are gathered and summed in an order on which all ranks agree (``order.py``);
* are finished together when the backward pass ends: sums that are still owed are issued, finished,
  and put into ``.grad``.

A unit's gradient is final in a backward pass when all its leaves have theirs, or when the
gradients of its inputs are computed; what is not final by then is at the end of the pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from terashard.comm.board import Board
from terashard.shard.module_unit import ModuleUnit
from terashard.shard.pool import BufferPool, Slot
from terashard.shard.residence import UnitState
from terashard.shard.rules import Pool
from terashard.shard.turn import Turn

ALTERNATING = 2
"""Slots in which units take turns; one more for every unit that is gathered ahead."""

_OWN = 1000
"""Slots with greater numbers are of one unit alone."""


class Root:
    """The units of one tree, in the order of registration."""

    def __init__(
        self,
        units: Sequence[ModuleUnit],
        parents: Mapping[str, Sequence[str]],
        pool: Pool,
    ) -> None:
        self.units = tuple(units)
        self.pool = BufferPool(units[0].axes.device) if units else BufferPool(torch.device("cpu"))
        self.kind = pool
        self.is_in_forward = False
        self.is_in_backward = False
        self.ahead = 0 if self.pool.device.type == "cpu" else 1
        """Gathers that are issued before their unit's turn; on a CPU nothing hides behind them."""
        self.shardings: list[Any] = []
        self._parents = {name for above in parents.values() for name in above}
        self._flying: deque[ModuleUnit] = deque()
        self._done: set[ModuleUnit] = set()
        self.turn = Turn(self.units, parents, _board(self.units))
        self._has_begun = False
        for unit in self.units:
            unit.on_arrival = self._arrival_of(unit)  # type: ignore[method-assign]
        self._assign()

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

    def look_ahead(self, phase: str) -> None:
        """Issue the gathers that are due next, as far as no unit in use would have to go."""
        for _ in range(self.ahead):
            unit = self.turn.coming(phase)
            if unit is None or unit.is_there or unit.stays:
                return
            holder = None if unit.is_aliased else self._holder(self._slot_for(unit))
            if holder is not None and holder.is_active:
                return
            self.bring(unit, phase, ahead=True)

    def show(self, unit: ModuleUnit) -> None:
        """Finish the gather of ``unit`` and of those it borrows from."""
        with self.turn.explained():
            for one in (*unit.lenders, unit):
                one.present(unit)

    def _gather(self, unit: ModuleUnit) -> None:
        self.turn.announce("gathers", unit)
        if unit.state is not UnitState.SHARDED:
            unit.drop()
        slot = self._slot_for(unit)
        holder = None if unit.is_aliased else self._holder(slot)
        if holder is not None:
            if holder.is_active and not unit.uses:
                unit.assign(self.pool.spare())
                slot = unit.slot
            else:
                holder.drop()
        unit.gather(slot)

    def _slot_for(self, unit: ModuleUnit) -> Slot:
        """Where ``unit`` is to be gathered: its own slot, or the one that is needed last."""
        if self.kind != "any" or unit.is_aliased:
            return unit.slot
        if unit in self._placed:
            return unit.slot
        shared = [slot for number, slot in self.pool.slots.items() if number < _OWN]
        free = [slot for slot in shared if self._is_free(slot)]
        if not free:
            free = [self.pool.spare()]
            free[0].reserve(self._longest)
        return max(free, key=lambda slot: (self._next_use(slot), slot is unit.slot))

    def _is_free(self, slot: Slot) -> bool:
        holder = self._holder(slot)
        return holder is None or not holder.is_active

    def _next_use(self, slot: Slot) -> int:
        holder = self._holder(slot)
        return len(self.units) + 1 if holder is None else self.turn.distance(holder)

    def _holder(self, slot: Slot) -> ModuleUnit | None:
        if slot.holder is None:
            return None
        return next(unit for unit in self.units if unit.holds(slot))

    def _assign(self) -> None:
        turns = 0
        self._longest = max((u.full_bytes for u in self.units), default=0)
        lenders = {lender for unit in self.units for lender in unit.lenders}
        self._placed = {u for u in self.units if u.name in self._parents or u.stays or u in lenders}
        for unit in self.units:
            if unit.is_assigned:  # by a root below this one: graphs may live that read its slot
                self._placed.add(unit)
                continue
            if self.kind == "off":
                slot = Slot(label=f"memory of unit {unit.name}", device=unit.axes.device)
                slot.is_own = True
            elif unit in self._placed:
                slot = self._own_slot()
            else:
                slot, turns = self.pool.slot(turns % ALTERNATING), turns + 1
            if self.kind == "any" and unit not in self._placed:
                slot.reserve(self._longest)
            unit.assign(slot, moving=self.kind == "any")

    def _own_slot(self) -> Slot:
        return self.pool.slot(_OWN + len(self.pool.slots))

    def place_again(self, units: Sequence[ModuleUnit]) -> None:
        """Rules changed: give units that are to stay full a slot of their own."""
        for unit in units:
            if self.kind == "static" and unit.stays and unit not in self._placed:
                unit.drop()
                unit.assign(self._own_slot())
                self._placed.add(unit)

    # ---- forward --------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward pass of the whole tree begins; what an aborted pass left is cleared away."""
        if self.is_in_backward or self.is_in_forward:
            self.abandon()
        for unit in self.units:
            if not unit.is_active and not unit.stays:
                unit.drop()
        if not self._has_begun:
            self._has_begun = True
            self.turn.agree_on_values()
        self.is_in_forward = True
        self.turn.begin("forward")

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
        self.turn.begin("backward")
        for unit in self.units:
            unit.arrived.clear()
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

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
            for following in self.turn.ready(unit):
                self._sum(following)

    def end_backward(self) -> None:
        """Issue the sums that are owed, finish all, publish gradients, clear away."""
        for passed in self.turn.rest("backward"):
            self._take_part(passed)
        for unit in self.units:
            unit.landing.collect()
        for unit in self.turn.owed():
            self._land_all()  # what is left is the largest, as a rule: the root's
            self._sum(unit)
        self._land_all()
        with self.turn.explained():
            self._publish()
        self.turn.compare("backward")
        for unit in self.units:
            if unit.rules.reshard_after_backward:
                unit.drop()
            unit.uses.clear()
        self._done = set()
        self.is_in_backward = False

    def abandon(self) -> None:
        """Clear away what a pass that raised left behind; its gradients are lost."""
        for unit in self.units:
            unit.drop()
            unit.landing.forget()
            unit.uses.clear()
        self._flying.clear()
        self._done = set()
        self.is_in_forward = self.is_in_backward = False
        self.turn.reset()

    def _sum(self, unit: ModuleUnit) -> None:
        with self.turn.explained():
            while len(self._flying) > unit.rules.max_flying:
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

    def _arrival_of(self, unit: ModuleUnit):  # type: ignore[no-untyped-def]
        def arrived() -> None:
            if self.is_in_backward and all(
                p in unit.arrived for p in unit.parameters if p.trainable
            ):
                self.ready(unit)

        return arrived


def _board(units: Sequence[ModuleUnit]) -> Board | None:
    """Where the ranks of all units talk; None if this rank is alone."""
    ranks = sorted({rank for unit in units for rank in unit.ranks})
    return Board.here(ranks) if len(ranks) > 1 else None
