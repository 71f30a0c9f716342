r"""A unit of a pipeline: parameters and their gradients, driven by explicit verbs.

::

    zero_gradients() → forward, backward … → reduce("shard") → reduce("replica") → reduce("tie") →
    wait_reduced()

``reduce`` only issues; ``wait_reduced`` finishes. Nothing happens but by these calls and those of
``residence.py``: there are no module hooks here. All ranks of an axis must call in the same order.
Gradients: ``gradient.py``.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from terashard.errors import RunError
from terashard.schedule.actions import Over
from terashard.schedule.traffic import UnitElements
from terashard.shard.axes import Axes
from terashard.shard.gradient import (
    Gradients,
    KeptGradients,
    PassingGradients,
    StashedGradients,
    WeightStash,
    flat_numel,
)
from terashard.shard.param import ShardedParameter
from terashard.shard.precision import Precision
from terashard.shard.reduction import Reduction
from terashard.shard.residence import Residence, UnitState

__all__ = ["ShardUnit", "UnitState"]


class ShardUnit(Residence):
    """The parameters of one module, kept in pieces, gathered, released and reduced together.

    ``parameters`` are those that this unit owns. A module may also use parameters of an earlier
    unit (a head with the embedding's weight): ``lenders`` are these units, which must be full too
    whenever this one computes, and whose gradient is final only after this one's backward. Until a
    slot is assigned, only ``materialise`` may be called. With ``each_micro`` the gradients are
    summed over the shards after every micro-batch, and full ones live only in between. With
    ``stashes`` those of some parameters are computed from there, when they are summed.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parameters: Sequence[ShardedParameter],
        *,
        mesh: Axes,
        precision: Precision,
        each_micro: bool = False,
        stashes: Mapping[ShardedParameter, WeightStash] | None = None,
    ) -> None:
        super().__init__(name, module, parameters, mesh)
        self.lenders: tuple[ShardUnit, ...] = ()
        self.precision = precision
        self.gradients: Gradients | None = None
        self._stashes = stashes
        self._reduction = Reduction(
            unit=name, axes=mesh, traffic=self.traffic, each_micro=each_micro
        )

    @property
    def elements(self) -> UnitElements:
        """Elements of the parameters that travel."""
        trained = [p for p in self.parameters if p.trainable]
        return UnitElements(
            gathered=sum(p.shape.numel() for p in self.parameters if not p.is_scalar),
            summed=sum(p.shape.numel() for p in trained),
            rows=flat_numel([p.local_shape for p in trained], self.precision),
            tied=sum(p.local_shape.numel() for p in trained if p.tied_to is not None),
        )

    @property
    def is_reducing(self) -> bool:
        """Whether a sum was issued and not finished."""
        return self._reduction.is_pending

    def zero_gradients(self) -> None:
        """Begin a step: forget all contributions, and refuse the graphs of earlier steps."""
        self._reduction.begin()
        self.rewritten()
        if self.gradients is None:
            self.gradients = self._new_gradients()
        self.gradients.zero()

    def reduce(self, over: Over) -> None:
        """Issue the sum of the gradients over one axis: each axis once per step, "shard" first.

        Over "shard" again for every micro-batch, if the unit was made so.
        """
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

    def _new_gradients(self) -> Gradients:
        self._full_views()
        trainable = [p for p in self.parameters if p.trainable]
        if self._stashes is not None:
            return StashedGradients(
                trainable, axes=self.axes, precision=self.precision, stashes=self._stashes
            )
        kind = PassingGradients if self._reduction.each_micro else KeptGradients
        return kind(trainable, axes=self.axes, precision=self.precision)

    def _begun(self) -> Gradients:
        if self.gradients is None:
            raise RunError(
                f"unit {self.name} has no gradients, as no step has begun;"
                " call zero_gradients first"
            )
        return self.gradients
