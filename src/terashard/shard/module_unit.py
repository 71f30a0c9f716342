r"""A unit of a module that is sharded by itself: full while that computes, summed when it is done.

It is driven by module hooks (``hooks.py``) through the ``Root`` of its tree. Beyond ``Residence``:

* *Hidden*: after its forward a unit gives its place in the modules back to the DTensors, but its
  slot stays filled until somebody else needs it. So the last units of the forward pass are still
  there when the backward pass begins.
* *Stale*: an optimizer step changes the kept parts; what was gathered before is then of no use. The
  version counters of the public parameters tell.
* *Adopted*: ``load_state_dict(assign=True)``, ``to_empty`` and ``.to(dtype)`` put other DTensors in
  place of the public ones; their values are taken over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from terashard.comm.custom import CustomGroup
from terashard.comm.group import Group
from terashard.comm.pieces import rows_of
from terashard.errors import RunError
from terashard.shard.axes import DataAxes
from terashard.shard.flat import FlatLayout
from terashard.shard.landing import Landing
from terashard.shard.leaves import Use, hand_over, watch
from terashard.shard.param import ShardedParameter
from terashard.shard.pool import Slot
from terashard.shard.residence import Residence, UnitState
from terashard.shard.rules import Rules


class ModuleUnit(Residence):
    """The parameters of one ``fully_shard`` call that are cut over the same ranks."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parameters: Sequence[ShardedParameter],
        *,
        axes: DataAxes,
        ranks: tuple[int, ...],
        rules: Rules,
    ) -> None:
        self.rules = rules
        super().__init__(name, module, parameters, axes)
        self.data: DataAxes = axes
        self.ranks = ranks
        """All data-parallel ranks, global."""
        self.smaller: Group | None = None
        """The smaller group over which the full parameters are cut after forward, if any."""
        self._inner: list[Tensor] | None = None
        self.holders: set[ModuleUnit] = set()
        """This unit and those that borrow from it, as long as code that reads it may run."""
        self.uses: WeakSet[Use] = WeakSet()
        self.arrived: set[ShardedParameter] = set()
        """Parameters whose gradient is complete in the backward pass that is going on."""
        self.lenders: tuple[ModuleUnit, ...] = ()
        self.on_arrival: Callable[[], object] = lambda: None
        """Called when a gradient is complete; the root of the tree sets it."""
        self._stamp = -1
        self._moves = False
        self.landing = Landing(self.parameters, axes=axes, rules=rules, traffic=self.traffic)

    @property
    def is_stale(self) -> bool:
        """Whether the kept parts changed since they were gathered."""
        return self._stamp != self._versions()

    @property
    def is_there(self) -> bool:
        """Whether the full parameters are in the slot, of the present values."""
        return self.state is not UnitState.SHARDED and not self.is_stale

    @property
    def is_assigned(self) -> bool:
        """Whether the unit has a slot."""
        return self._lease is not None

    @property
    def stays(self) -> bool:
        """Whether the unit is to stay full after forward, or after backward."""
        return self.rules.reshard_after_forward is False or not self.rules.reshard_after_backward

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter of the unit wants a gradient, or did since the last sum."""
        return any(p.trainable or self.landing.owes(p) for p in self.parameters)

    @property
    def has_all_gradients(self) -> bool:
        """Whether every gradient is complete in the backward pass that is going on."""
        return all(p in self.arrived for p in self.parameters if p.trainable)

    @property
    def sums(self) -> bool:
        """Whether a backward pass ends with a sum of the unit's gradients."""
        return self.rules.sums and self.is_trainable

    def assign(self, slot: Slot, *, moving: bool = False) -> None:
        """See ``Residence.assign``; a unit may be given another slot.

        A graph that lives raises if it reads the unit in the old one; what it adds to gradients
        without that is handed over.
        """
        former = [] if self._lease is None else [p.full for p in self.parameters]
        self._lease, self._targets, self._moves = None, None, moving
        super().assign(slot, moving=moving)
        self._full_views()
        for parameter in self.parameters:
            watch(parameter, self)
        for leaf, parameter in zip(former, self.parameters, strict=bool(former)):
            hand_over(leaf, parameter.full)

    def gather(self, slot: Slot | None = None) -> None:
        """See ``Residence.gather``; takes over what stands in the modules."""
        self.adopt()
        versions = self._versions()
        if versions != self._stamp:
            self.rewritten()
        super().gather(slot)
        self._stamp = versions

    @property
    def is_active(self) -> bool:
        """Whether code that reads the full parameters is running, or may at any time."""
        return bool(self.holders)

    def present(self, holder: ModuleUnit) -> None:
        """Let the full parameters stand in the modules for ``holder``; they must be gathered."""
        was_full = self.state is UnitState.FULL
        self.wait()
        if was_full:
            self.show_full()
        self.follow_training()
        self.holders.add(holder)

    def hide(self, holder: ModuleUnit | None = None) -> None:
        """Let the public parameters stand in the modules, unless others hold the unit too.

        The slot stays filled for now. Units that this one borrows from are let go of with it.
        """
        if holder is None:
            for lender in self.lenders:
                lender.hide(self)
        self.holders.discard(holder or self)
        if self.holders:
            return
        if self.state is UnitState.FULL:
            self.follow_training()
            self.show_sharded()
            if self.slot.is_own:
                self.release()

    def shrink(self) -> None:
        """Keep, until the next gather, this rank's part of the smaller group; release the rest."""
        if self.smaller is None or self.holders or self.state is not UnitState.FULL:
            return
        group, views = self.smaller, self._full_views()[1]
        self._inner = [
            rows_of(p.as_rows(view), group.size, group.rank).clone()
            for p, view in zip(self.parameters, views, strict=True)
            if not p.is_scalar
        ]
        self.release()

    def drop(self) -> None:
        """Be sharded, whatever was before."""
        if self.state is UnitState.GATHERING:
            self.wait()
        if self.state is UnitState.FULL:
            self.follow_training()
            self.release()
        self._inner = None
        self.holders.clear()

    def separate_groups(self, separate: bool) -> None:
        """Say whether sums have a communicator of their own."""
        shared = self.data.shard_reduce if separate else self.data.shard_gather
        self._use(replace(cast(DataAxes, self.axes), shard_reduce=shared))

    def custom_gather(self, comm: Any) -> None:
        """Gather through ``comm``, in torch's protocol."""
        if self.data.gather_handle is not None:
            group = CustomGroup(self.data.shard_gather, self.data.gather_handle, gather=comm)
            self._use(replace(cast(DataAxes, self.axes), shard_gather=group))

    def custom_scatter(self, comm: Any) -> None:
        """Sum through ``comm``, in torch's protocol."""
        if self.data.reduce_handle is not None:
            group = CustomGroup(self.data.shard_reduce, self.data.reduce_handle, scatter=comm)
            self._use(replace(cast(DataAxes, self.axes), shard_reduce=group))

    def _fetch(self, targets: list[Tensor]) -> None:
        inner, self._inner = self._inner, None
        if inner is None or self.smaller is None or self.is_stale:
            super()._fetch(targets)
        else:
            self._fetch_inner(targets, inner, self.smaller)

    def _fetch_inner(self, targets: list[Tensor], inner: list[Tensor], group: Group) -> None:
        """Complete the parameters from the parts that a smaller group kept."""
        parts = iter(inner)
        travelling: list[Tensor] = []
        for p, target in zip(self.parameters, targets, strict=True):
            if p.is_scalar:
                target.copy_(p.local)
                continue
            whole = p.travelling(target)
            rows_of(whole, group.size, group.rank).copy_(next(parts))
            travelling.append(whole)
            if not p.is_in_place:
                self._staged.append((target, p.at_home(whole)))
        self._arriving = group.gather_rows(travelling)
        self.traffic.gathered_bytes += sum(whole.nbytes for whole in travelling)

    def _use(self, axes: Any) -> None:
        self.axes = self.landing.axes = axes

    @property
    def _kept_device(self) -> torch.device:
        return torch.device("cpu") if self.rules.offload else self.axes.device

    def follow_training(self) -> None:
        """Freeze or thaw the full leaves as the public parameters are; or these as those were."""
        for p in self.parameters:
            if p.full.requires_grad is not p.trainable:  # changed while it stood in the module
                p.sharded.requires_grad_(p.full.requires_grad)
            p.trainable = p.sharded.requires_grad
            if p.full.requires_grad is not p.trainable:
                p.full.requires_grad_(p.trainable)

    def adopt(self) -> None:
        """Take over the values of what was put in place of the public parameters."""
        changed = False
        for p in self.parameters:
            if p.written is False and p.sharded._version > 0:
                p.written = True
            there = p.places[0].find()
            if (there is p.sharded and p.lies_in_place) or p.is_full(there):
                continue
            p.sharded, p.written, changed = self._same(p, there), True, True
        if changed:
            self._lay_again()

    def _require_fit(self) -> None:
        for parameter in self.parameters:
            parameter.require_written()

    def _same(self, p: ShardedParameter, there: Any) -> nn.Parameter:
        """``there``, if it is spread as ``p`` is."""
        spread = p.spread
        wanted = (spread.mesh, spread.placements, spread.shape)
        if isinstance(there, DTensor) and (
            (there.device_mesh, there.placements, there.shape) == wanted
        ):
            return cast(nn.Parameter, there)
        found = "nothing" if there is None else f"{type(there).__name__} {tuple(there.shape)}"
        raise RunError(
            f"parameter {p.name} was replaced after its module was sharded: {found} stands there,"
            f" not a DTensor of shape {tuple(spread.shape)} with placements {spread.placements};"
            " change it in place under torch.no_grad(), or with full_parameters(…, writeback=True)"
        )

    def _lay_again(self) -> None:
        """Keep the values of the public parameters in a flat buffer again, in their formats."""
        before = [p.form.dtype for p in self.parameters]
        for p in self.parameters:
            p.form = p.form.cast(p.sharded.dtype)
        kept = FlatLayout.of([p.cut.part(p.form) for p in self.parameters])
        self._shard = kept.zeros(self._kept_device)
        with torch.no_grad():
            for p, local in zip(self.parameters, kept.views(self._shard), strict=True):
                p.lie_in(local)
        self._stamp = -1
        if self._lease is None:
            for p in self.parameters:
                p.compute = self.rules.compute_dtype(p.form.dtype)
            self._layout = FlatLayout.of([p.form.cast(p.compute) for p in self.parameters])
        elif before != [p.form.dtype for p in self.parameters] or self.is_aliased:
            for p in self.parameters:
                p.compute = self.rules.compute_dtype(p.form.dtype)
            self._layout = FlatLayout.of([p.form.cast(p.compute) for p in self.parameters])
            slot = self.slot
            slot.grow(self._layout.nbytes)
            self.assign(slot, moving=self._moves)

    def _versions(self) -> int:
        return sum(p.sharded._version for p in self.parameters)
