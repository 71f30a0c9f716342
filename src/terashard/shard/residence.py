r"""Parameters that travel together: kept in pieces, gathered whole, released.

::

                gather()              wait()
      SHARDED ───────────> GATHERING ────────> FULL
         ^                                      │
         └──────────────── release() ───────────┘

``gather`` only issues; ``wait`` finishes. Nothing happens but by these calls. All ranks of an axis
must call in the same order.

What is copied: ``gather`` casts this rank's part into the slot, the other parts arrive in place
(``param.py`` says when they cannot). With one shard, and nothing to cast, the full parameters are
the shard itself, and gathering moves nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor, nn

from terashard.comm.group import Work
from terashard.errors import RunError
from terashard.shard.axes import Axes
from terashard.shard.flat import FlatLayout
from terashard.shard.moving import MovingLease
from terashard.shard.param import ShardedParameter
from terashard.shard.pool import Lease, Slot


class UnitState(Enum):
    """Where the parameters of a unit are."""

    SHARDED = auto()
    GATHERING = auto()
    FULL = auto()


@dataclass(slots=True)
class Traffic:
    """What a unit has asked for so far; bytes: of the tensors handed to a group of several."""

    gathers: int = 0
    gathered_bytes: int = 0
    reductions: int = 0
    reduced_bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        """What two units have asked for together."""
        return Traffic(
            self.gathers + other.gathers,
            self.gathered_bytes + other.gathered_bytes,
            self.reductions + other.reductions,
            self.reduced_bytes + other.reduced_bytes,
        )


class Residence:
    """The parameters of one unit, in pieces or full."""

    def __init__(
        self, name: str, module: nn.Module, parameters: Sequence[ShardedParameter], axes: Axes
    ) -> None:
        self.name = name
        self.module = module
        self.parameters = tuple(parameters)
        self.axes = axes
        self.state = UnitState.SHARDED
        self.traffic = Traffic()
        self._layout = FlatLayout.of([p.form.cast(p.compute) for p in self.parameters])
        self._lease: Lease | None = None
        self._targets: list[Tensor] | None = None
        self._arriving: Work | None = None
        self._staged: list[tuple[Tensor, Tensor]] = []
        self._route: tuple[list[Tensor], list[Tensor]] | None = None
        self._keep_rows()

    @property
    def is_aliased(self) -> bool:
        """Whether the full parameters are the shard itself, so that no slot is used."""
        return self.axes.shards == 1 and all(p.compute == p.form.dtype for p in self.parameters)

    @property
    def full_bytes(self) -> int:
        """Bytes of a slot that holds the full parameters."""
        return self._layout.nbytes

    def rename(self, name: str) -> None:
        """Call the unit otherwise from now on."""
        self.name = name
        if self._lease is not None:
            self._lease.owner = name

    def holds(self, slot: Slot) -> bool:
        """Whether the unit is in ``slot``."""
        return slot.holder is not None and slot.holder is self._lease

    @property
    def slot(self) -> Slot:
        """The slot where the full parameters lie, or lay last."""
        return self._leased.slot

    def assign(self, slot: Slot, *, moving: bool = False) -> None:
        """Say where the full parameters will lie; an aliased unit needs no slot.

        A unit keeps its slot for ever, unless it is ``moving``: then ``gather`` may name another,
        and every forward that reads the unit must run under ``moving.saving_notes``.
        """
        if self._lease is not None:
            raise RunError(f"unit {self.name} has {self._lease.slot.label}; a unit keeps its slot")
        if self.is_aliased:
            slot = Slot.over(self._shard, f"the shard of unit {self.name}")
        slot.reserve(self._layout.nbytes)
        self._lease = (
            MovingLease(slot, self.name)
            if moving and not self.is_aliased
            else Lease(slot, self.name)
        )

    def gather(self, slot: Slot | None = None) -> None:
        """Issue the gathering of the full parameters; from now on the slot is this unit's.

        ``slot`` moves a moving unit there; an aliased one stays where it is.
        """
        self._expect(UnitState.SHARDED, "gathered")
        self._require_fit()
        if slot is not None and isinstance(self._leased, MovingLease):
            self._move(self._leased, slot)
        lease, targets = self._full_views()
        lease.take()
        if not self.is_aliased:
            self._fetch(targets)
        self.traffic.gathers += 1
        self.state = UnitState.GATHERING

    def wait(self) -> None:
        """Finish ``gather``: the modules hold full parameters. Does nothing if they do already."""
        if self.state is UnitState.FULL:
            return
        self._expect(UnitState.GATHERING, "waited for")
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        for target, travelled in self._staged:
            target.copy_(travelled)
        self._staged = []
        self._leased.open()
        self.show_full()
        self.state = UnitState.FULL

    def release(self) -> None:
        """Give the slot back; a backward that needs the parameters raises until the next gather."""
        self._expect(UnitState.FULL, "released")
        self.show_sharded()
        self._leased.close()
        self.state = UnitState.SHARDED

    def rewritten(self) -> None:
        """Say that the values changed: graphs recorded before cannot be run backward any more."""
        if self._lease is not None:
            self._lease.renew()

    def show_full(self) -> None:
        """Let the full parameters stand in the modules."""
        for parameter in self.parameters:
            parameter.show_full()

    def show_sharded(self) -> None:
        """Let the public parameters stand in the modules."""
        for parameter in self.parameters:
            parameter.show_sharded()

    def _require_fit(self) -> None:
        """Refuse parameters that were never written, or were moved elsewhere."""
        for parameter in self.parameters:
            parameter.require_written()
            parameter.require_in_place()

    @property
    def _leased(self) -> Lease:
        if self._lease is None:
            raise RunError(f"unit {self.name} has no slot; assign one before the first gather")
        return self._lease

    @property
    def _kept_device(self) -> torch.device:
        """Where the pieces are kept."""
        return self.axes.device

    def _keep_rows(self) -> None:
        layout = FlatLayout.of([p.cut.part(p.form) for p in self.parameters])
        self._shard = layout.zeros(self._kept_device)
        for parameter, local in zip(self.parameters, layout.views(self._shard), strict=True):
            parameter.keep_in(local)

    def _move(self, lease: MovingLease, slot: Slot) -> None:
        first = self._targets is None
        if slot is lease.slot and not first:
            return
        slot.reserve(self._layout.nbytes)
        slot.restore()
        lease.move(slot)
        if not first:
            self._show_in(lease)

    def _show_in(self, lease: Lease) -> None:
        with torch.inference_mode(False):
            views = self._layout.views(lease.view)
            for parameter, view in zip(self.parameters, views, strict=True):
                parameter.full.data = view if parameter.dress is None else parameter.dress(view)
            self._targets, self._route = self._layout.views(lease.slot.flat()), None

    def _full_views(self) -> tuple[Lease, list[Tensor]]:
        """The lease, and the tensors that a gather fills; both are made once."""
        lease = self._leased
        if self._targets is None:
            # A leaf born in inference mode could never take part in a later training step.
            with torch.inference_mode(False):
                views = self._layout.views(lease.view)
                for parameter, view in zip(self.parameters, views, strict=True):
                    parameter.compute_in(view)
                self._targets, self._route = self._layout.views(lease.slot.flat()), None
        return lease, self._targets

    def _fetch(self, targets: list[Tensor]) -> None:
        if not targets:
            return
        if self._route is None:
            self._route = self._routed(targets)
        own, cut = self._route
        if self._staged:
            self._route = None  # tensors that only travel are made anew
        torch._foreach_copy_(own, [parameter.local for parameter in self.parameters])
        if cut and self.axes.shards > 1:
            self._arriving = self.axes.shard_gather.gather_rows(cut)
            self.traffic.gathered_bytes += sum(tensor.nbytes for tensor in cut)

    def _routed(self, targets: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's parts of the tensors that travel, and those tensors."""
        travelling = [p.travelling(t) for p, t in zip(self.parameters, targets, strict=True)]
        self._staged = [
            (target, p.at_home(tensor))
            for p, target, tensor in zip(self.parameters, targets, travelling, strict=True)
            if not p.is_in_place
        ]
        pairs = list(zip(self.parameters, travelling, strict=True))
        own = [p.own_rows(p.at_home(tensor)) for p, tensor in pairs]
        return own, [tensor for p, tensor in pairs if not p.is_scalar]

    def _expect(self, state: UnitState, verb: str) -> None:
        if self.state is not state:
            raise RunError(
                f"unit {self.name} is {self.state.name} and cannot be {verb};"
                f" it must be {state.name}"
            )
