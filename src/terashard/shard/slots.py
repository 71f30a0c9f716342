"""Which slot each unit of a tree is gathered into, and who has to go for it.

A unit that stays full, one that has other units below it and one that others borrow from each lie
in a slot of their own. The rest take turns in ``ALTERNATING`` slots: a unit always in the same one
(``"static"``), or in the one whose content is needed last (``"any"``). With ``"off"`` every unit
has memory of its own that goes back to the allocator at every release. Where all slots are in use,
one more is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from terashard.shard.module_unit import ModuleUnit
from terashard.shard.pool import BufferPool, Slot
from terashard.shard.residence import UnitState
from terashard.shard.rules import Pool

ALTERNATING = 2
"""Slots in which units take turns: one that is read, one that is being filled."""

_OWN = 1000
"""Slots with greater numbers are of one unit alone."""


class Slots:
    """The slots of the units of one tree, in the order of registration.

    ``parents``: names of the units that have others below them. ``distance`` says in how many turns
    a unit is needed next.
    """

    def __init__(
        self,
        units: Sequence[ModuleUnit],
        parents: Collection[str],
        kind: Pool,
        distance: Callable[[ModuleUnit], int],
    ) -> None:
        self.pool = BufferPool(units[0].axes.device if units else torch.device("cpu"))
        self._units = units
        self._kind = kind
        self._distance = distance
        self._longest = max((u.full_bytes for u in units), default=0)
        lenders = {lender for unit in units for lender in unit.lenders}
        # A root below this one may have assigned some: graphs may live that read its slots.
        self._apart = {
            u for u in units if u.is_assigned or u.name in parents or u.stays or u in lenders
        }
        self._assign()

    def take(self, unit: ModuleUnit, *, in_backward: bool) -> Slot:
        """The slot into which ``unit`` is to be gathered now; whoever was there is gone.

        One that is being read stays, and the unit gets a slot that nobody had. In a backward pass
        that comes to a graph of the unit, the slot must be the one that the graph reads.
        """
        slot = self._slot_for(unit)
        holder = self._holder(unit, slot)
        if holder is not None:
            if holder.is_active and not (in_backward and unit.uses):
                unit.assign(self.pool.spare())
                return unit.slot
            holder.drop()
        return slot

    def would_push_out(self, unit: ModuleUnit) -> bool:
        """Whether a gather of ``unit`` would push out a unit that is read, or take a new slot."""
        holder = self._holder(unit, self._slot_for(unit))
        return holder is not None and holder.is_active

    def free(self, *, is_over: bool) -> None:
        """Give back the memory of slots that nobody reads, but for units that are to stay full.

        Until a backward pass ``is_over``, a unit may be read that still wants gradients.
        """
        stays = {unit for unit in self._units if unit.stays and not unit.rules.is_default}
        for slot in self.pool.slots.values():
            holder = self._holder_of(slot)
            if holder is not None:
                if holder in stays or holder.is_active or holder.state is UnitState.GATHERING:
                    continue
                if not (is_over or holder.has_all_gradients):
                    continue
                holder.drop()
            if not any(unit.slot is slot for unit in stays):
                slot.free()

    def set_apart(self) -> None:
        """Give units that are to stay full by now a slot of their own, unless a graph lives."""
        for unit in self._units:
            if self._kind != "static" or unit in self._apart or unit.is_aliased:
                continue
            if unit.stays and not unit.uses:
                unit.drop()
                unit.assign(self._own_slot())
                self._apart.add(unit)

    def _slot_for(self, unit: ModuleUnit) -> Slot:
        if self._kind != "any" or unit.is_aliased or unit in self._apart:
            return unit.slot
        shared = [slot for number, slot in self.pool.slots.items() if number < _OWN]
        free = [slot for slot in shared if self._is_free(slot)]
        if not free:
            free = [self.pool.spare()]
            free[0].reserve(self._longest)
        return max(free, key=lambda slot: (self._next_use(slot), slot is unit.slot))

    def _is_free(self, slot: Slot) -> bool:
        holder = self._holder_of(slot)
        return holder is None or not holder.is_active

    def _next_use(self, slot: Slot) -> int:
        holder = self._holder_of(slot)
        return len(self._units) + 1 if holder is None else self._distance(holder)

    def _holder(self, unit: ModuleUnit, slot: Slot) -> ModuleUnit | None:
        return None if unit.is_aliased else self._holder_of(slot)

    def _holder_of(self, slot: Slot) -> ModuleUnit | None:
        if slot.holder is None:
            return None
        return next(unit for unit in self._units if unit.holds(slot))

    def _assign(self) -> None:
        turns = 0
        for unit in self._units:
            if unit.is_assigned:
                continue
            if self._kind == "off":
                slot = Slot(label=f"memory of unit {unit.name}", device=unit.axes.device)
                slot.is_own = True
            elif unit in self._apart:
                slot = self._own_slot()
            else:
                slot, turns = self.pool.slot(turns % ALTERNATING), turns + 1
            if self._kind == "any" and unit not in self._apart:
                slot.reserve(self._longest)
            unit.assign(slot, moving=self._kind == "any")

    def _own_slot(self) -> Slot:
        return self.pool.slot(_OWN + len(self.pool.slots))
