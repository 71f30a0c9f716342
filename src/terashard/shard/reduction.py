"""Sums of a unit's gradients over the axes of the mesh, one after the other.

Order: over "shard" first, which leaves this rank's rows of the sum over shards; then these rows
over "replica", the copies of the whole pipeline, and over "tie", the other stage that uses the same
weight. Each axis once per step: a second sum would count every contribution twice. Only where the
accumulators pass (``gradient.py``) may the sum over shards come again, of what came since.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from torch import Tensor

from terashard.comm.group import Group, Work
from terashard.errors import RunError
from terashard.schedule.actions import Over
from terashard.shard.axes import Axes
from terashard.shard.gradient import Gradients
from terashard.shard.residence import Traffic


@dataclass(slots=True, kw_only=True)
class Reduction:
    """The reductions of one unit: what was summed in this step, and what is still on its way."""

    unit: str
    axes: Axes
    traffic: Traffic
    each_micro: bool = False
    """Whether the sum over shards is taken after every micro-batch."""
    done: set[Over] = field(default_factory=set)
    _works: list[Work] = field(default_factory=list)
    _landing: Gradients | None = None
    """Those whose sum over shards is on its way."""

    @property
    def is_pending(self) -> bool:
        """Whether something was issued and not waited for."""
        return bool(self._works)

    @property
    def is_final(self) -> bool:
        """Whether the rows hold sums over the shards."""
        return "shard" in self.done or self.axes.shard_reduce.size == 1

    def begin(self) -> None:
        """Begin a step."""
        if self._works:
            raise RunError(
                f"unit {self.unit} is being reduced;"
                " call wait_reduced before its gradients are zeroed"
            )
        self.done.clear()

    def issue(self, gradients: Gradients, over: Over) -> None:
        """Issue the sum over one axis; what was issued before is finished first."""
        self._refuse(over)
        self.finish()
        self.done.add(over)
        self.traffic.reductions += 1
        if not gradients.parameters:
            return
        match over:
            case "shard":
                self._over_shards(gradients)
            case "replica":
                self._sum(self.axes.replica, [gradients.flat_rows])
            case "tie":
                self._over_ties(gradients)
            case _:
                assert_never(over)

    def finish(self) -> None:
        """Wait for everything that was issued."""
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._landing is not None:
            self._landing.landed()
            self._landing = None

    def _refuse(self, over: Over) -> None:
        again = self.each_micro and over == "shard" and self.done == {"shard"}
        if over in self.done and not again:
            raise RunError(
                f"unit {self.unit} was reduced over {over!r} already in this step; once is allowed,"
                " because a second sum would count every contribution twice"
            )
        if over == "shard" and self.done and not again:
            raise RunError(
                f"unit {self.unit} was reduced over {', '.join(sorted(self.done))} before 'shard';"
                " 'shard' comes first"
            )
        if over != "shard" and not self.is_final:
            raise RunError(
                f"unit {self.unit} is to be reduced over {over!r} before 'shard';"
                " 'shard' comes first"
            )

    def _over_shards(self, gradients: Gradients) -> None:
        group = self.axes.shard_reduce
        if group.size == 1:
            gradients.alone()
            return
        pairs = list(zip(gradients.parameters, gradients.take(), strict=True))
        cut = [pair for p, pair in pairs if not p.is_scalar]
        scalars = [pair for p, pair in pairs if p.is_scalar]
        if cut:
            full, rows = [pair[0] for pair in cut], [pair[1] for pair in cut]
            self._works.append(group.sum_scatter(full, rows))
            self.traffic.reduced_bytes += sum(tensor.nbytes for tensor in full)
        for whole, kept in scalars:
            kept.copy_(whole)
        self._sum(group, [kept for _, kept in scalars])
        self._landing = gradients

    def _over_ties(self, gradients: Gradients) -> None:
        tied, group = gradients.tied_rows(), self.axes.tie
        if not tied or group is None:
            why = "this rank has no stage to tie to" if tied else "none of its parameters is tied"
            raise RunError(
                f"unit {self.unit} is to be reduced over 'tie', but {why};"
                " take this reduction out of the schedule"
            )
        self._sum(group, tied)

    def _sum(self, group: Group, tensors: Sequence[Tensor]) -> None:
        if group.size > 1:
            self._works.extend(group.sum(tensor) for tensor in tensors)
            self.traffic.reduced_bytes += sum(tensor.nbytes for tensor in tensors)
