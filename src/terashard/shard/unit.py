r"""Parameters that travel together, driven by explicit verbs.

::

                gather()              wait()
      SHARDED ───────────> GATHERING ────────> FULL
         ^                                      │
         └──────────────── release() ───────────┘

    zero_gradients() → forward, backward … → reduce("shard") → reduce("replica") → reduce("tie") →
    wait_reduced()

``gather`` and ``reduce`` only issue; ``wait`` and ``wait_reduced`` finish. Nothing happens but by
these calls: there are no module hooks here. All ranks of an axis must call in the same order.

What is copied: ``gather`` casts this rank's rows into the slot, the other rows arrive in place.
With one shard and ``compute == master`` the full parameters are the shard itself, and gathering
moves nothing. Gradients: ``gradient.py``.
"""

from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import Tensor, nn

from terashard.comm.group import Work
from terashard.comm.mesh import Mesh
from terashard.errors import RunError
from terashard.schedule.actions import Over
from terashard.shard.flat import FlatLayout
from terashard.shard.gradient import Gradients
from terashard.shard.param import ShardedParameter
from terashard.shard.pool import Lease, Slot
from terashard.shard.precision import Precision
from terashard.shard.reduction import Reduction, Traffic


class UnitState(Enum):
    """Where the parameters of a unit are."""

    SHARDED = auto()
    GATHERING = auto()
    FULL = auto()


class ShardUnit:
    """The parameters of one module, kept in pieces, gathered, released and reduced together.

    ``parameters`` are those that this unit owns. A module may also use parameters of an earlier
    unit (a head with the embedding's weight): ``lenders`` are these units, which must be full too
    whenever this one computes, and whose gradient is final only after this one's backward. Until a
    slot is assigned, only ``materialise`` may be called.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parameters: Sequence[ShardedParameter],
        *,
        mesh: Mesh,
        precision: Precision,
    ) -> None:
        self.name = name
        self.module = module
        self.parameters = tuple(parameters)
        self.lenders: tuple[ShardUnit, ...] = ()
        self.mesh = mesh
        self.precision = precision
        self.state = UnitState.SHARDED
        self.traffic = Traffic()
        self.gradients: Gradients | None = None
        self._reduction = Reduction(unit=name, mesh=mesh, traffic=self.traffic)
        self._layout = FlatLayout.of([p.shape for p in self.parameters])
        self._lease: Lease | None = None
        self._targets: list[Tensor] | None = None
        self._arriving: Work | None = None
        self._keep_rows()

    @property
    def is_aliased(self) -> bool:
        """Whether the full parameters are the shard itself, so that no slot is used."""
        return self.mesh.shards == 1 and self.precision.compute == self.precision.master

    @property
    def is_reducing(self) -> bool:
        """Whether a sum was issued and not finished."""
        return self._reduction.is_pending

    def assign(self, slot: Slot) -> None:
        """Say where the full parameters will lie, once for ever; an aliased unit needs no slot."""
        if self._lease is not None:
            raise RunError(f"unit {self.name} has {self._lease.slot.label}; a unit keeps its slot")
        if self.is_aliased:
            slot = Slot.over(self._shard, f"the shard of unit {self.name}")
        slot.reserve(self._layout.numel)
        self._lease = Lease(slot, self.name)

    def gather(self) -> None:
        """Issue the gathering of the full parameters; from now on the slot is this unit's."""
        self._expect(UnitState.SHARDED, "gathered")
        for parameter in self.parameters:
            parameter.require_written()
            parameter.require_in_place()
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
        self._full_views()[0].open()
        for parameter in self.parameters:
            parameter.show_full()
        self.state = UnitState.FULL

    def release(self) -> None:
        """Give the slot back; a backward that needs the parameters raises until the next gather."""
        self._expect(UnitState.FULL, "released")
        for parameter in self.parameters:
            parameter.show_sharded()
        self._full_views()[0].close()
        self.state = UnitState.SHARDED

    def rewritten(self) -> None:
        """Say that the values changed: graphs recorded before cannot be run backward any more."""
        if self._lease is not None:
            self._lease.renew()

    def zero_gradients(self) -> None:
        """Begin a step: forget all contributions, and refuse the graphs of earlier steps."""
        self._reduction.begin()
        self.rewritten()
        if self.gradients is None:
            self.gradients = self._new_gradients()
        self.gradients.zero()

    def reduce(self, over: Over) -> None:
        """Issue the sum of the gradients over one axis: each axis once per step, "shard" first."""
        self._reduction.issue(self._begun(), over)

    def wait_issued(self) -> None:
        """Finish the sums that were issued, and let go of the memory they needed; more may come."""
        self._reduction.finish()

    def wait_reduced(self) -> None:
        """Finish all reductions and set ``.grad`` of the public parameters to the summed rows."""
        gradients = self._begun()
        if not self._reduction.is_final:
            raise RunError(
                f"the gradients of unit {self.name} were not summed over the shards in this step;"
                ' call reduce("shard") before wait_reduced'
            )
        self._reduction.finish()
        gradients.publish()

    def _keep_rows(self) -> None:
        layout = FlatLayout.of([p.local_shape for p in self.parameters])
        self._shard = torch.zeros(
            layout.numel, dtype=self.precision.master, device=self.mesh.device
        )
        for parameter, local in zip(self.parameters, layout.views(self._shard), strict=True):
            parameter.keep_in(local, self.mesh.device_mesh)

    def _full_views(self) -> tuple[Lease, list[Tensor]]:
        """The lease, and the tensors that a gather fills; both are made once."""
        lease = self._lease
        if lease is None:
            raise RunError(f"unit {self.name} has no slot; assign one before the first gather")
        if self._targets is None:
            views = self._layout.views(lease.view)
            for parameter, view in zip(self.parameters, views, strict=True):
                parameter.compute_in(view)
            self._targets = self._layout.views(lease.slot.flat())
        return lease, self._targets

    def _fetch(self, targets: list[Tensor]) -> None:
        pairs = list(zip(self.parameters, targets, strict=True))
        if not pairs:
            return
        own = [parameter.own_rows(target) for parameter, target in pairs]
        torch._foreach_copy_(own, [parameter.local for parameter in self.parameters])
        cut = [target for parameter, target in pairs if not parameter.is_scalar]
        if cut and self.mesh.shards > 1:
            self._arriving = self.mesh.shard_gather.gather_rows(cut)
            self.traffic.gathered_bytes += sum(target.nbytes for target in cut)

    def _new_gradients(self) -> Gradients:
        self._full_views()
        trainable = [p for p in self.parameters if p.trainable]
        return Gradients(trainable, mesh=self.mesh, precision=self.precision)

    def _begun(self) -> Gradients:
        if self.gradients is None:
            raise RunError(
                f"unit {self.name} has no gradients, as no step has begun;"
                " call zero_gradients first"
            )
        return self.gradients

    def _expect(self, state: UnitState, verb: str) -> None:
        if self.state is not state:
            raise RunError(
                f"unit {self.name} is {self.state.name} and cannot be {verb};"
                f" it must be {state.name}"
            )
