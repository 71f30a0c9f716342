r"""Gradients of a unit that is sharded by itself, from where autograd leaves them to ``.grad``.

::

    full.grad ──collect──> waiting ──issue──> sum over shards ──┬─> sum over replicas ──> rows
                  (no sum yet: they add up)                     └─> partial, for the next sum
    rows / divisor ──publish──> sharded.grad, or added to it

Autograd leaves a full gradient on the full leaf and adds the next one to it in place. Where no sum
follows, formats narrower than float32 are added up in float32 apart, backward pass by backward
pass; uses within one pass add up in the leaf's own. Every rank takes part in every sum, with zeros
where it has no gradient; a parameter for which no rank had one gets no gradient, as in one process.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from terashard.comm.group import Work
from terashard.comm.pieces import wide_dtype
from terashard.shard.axes import Axes
from terashard.shard.flat import FlatLayout
from terashard.shard.param import ShardedParameter
from terashard.shard.residence import Traffic
from terashard.shard.rules import Rules
from terashard.shard.sparse import exchange_rows, touch


class Told(Protocol):
    """What all ranks know of each other's gradients."""

    def had(self, p: ShardedParameter, *, here: bool) -> bool:
        """Whether any rank had a gradient of ``p``; ``here``: whether this one had."""


class Landing:
    """The gradients of one unit."""

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        *,
        axes: Axes,
        rules: Rules,
        traffic: Traffic,
    ) -> None:
        self.parameters = parameters
        self.axes = axes
        self._rules = rules
        self._traffic = traffic
        self._waiting: dict[ShardedParameter, Tensor] = {}
        self._partial: dict[ShardedParameter, Tensor] = {}
        self._summed: dict[ShardedParameter, Tensor] = {}
        self.present: dict[ShardedParameter, bool] = {}
        """By parameter of the sum that is on its way: whether this rank had a gradient."""
        self._carried: set[ShardedParameter] = set()
        self._owed: set[ShardedParameter] = set()
        """Parameters that were trained since the last sum over all ranks, frozen now or not."""
        self._works: list[Work] = []

    @property
    def is_flying(self) -> bool:
        """Whether a sum was issued and not published."""
        return bool(self._summed)

    @property
    def waits(self) -> bool:
        """Whether gradients wait to be summed."""
        dense = (p for p in self.parameters if not p.is_sparse)
        return bool(self._waiting) or any(p.full.grad is not None for p in dense)

    def owes(self, p: ShardedParameter) -> bool:
        """Whether a gradient of ``p`` may wait for a sum, on some rank."""
        return p in self._owed

    @property
    def summed(self) -> list[ShardedParameter]:
        """The parameters that take part in the next sum, the same on all ranks."""
        return [p for p in self.parameters if p.trainable or p in self._owed]

    @property
    def carries(self) -> bool:
        """Whether partial sums wait for the sum over replicas."""
        return bool(self._partial)

    def collect(self) -> bool:
        """Take gradients off the leaves if they wait in another format; whether there are any."""
        for p in self.parameters:
            if p.trainable:
                self._owed.add(p)
            gradient = p.full.grad
            if gradient is None or gradient.is_sparse:
                continue
            if isinstance(gradient, DTensor):
                gradient = p.local_gradient(gradient)
            wide = self._waiting_dtype(p)
            if gradient.dtype != wide or gradient is not p.full.grad:
                p.full.grad = None
                if p in self._waiting:
                    self._waiting[p].add_(gradient)
                else:
                    self._waiting[p] = gradient.to(wide)
        return self.waits

    def forget(self) -> None:
        """Drop everything that has not been published."""
        for work in self._works:
            work.wait()
        for store in (self._waiting, self._partial, self._summed, self.present):
            store.clear()
        self._works, self._carried, self._owed = [], set(), set()
        for p in self.parameters:
            p.full.grad = None

    def issue(self) -> None:
        """Issue the sum over the shards of all gradients that wait, and let go of them."""
        summed = [p for p in self.summed if not p.is_sparse]
        gradients = {p: self._taken(p) for p in summed}
        self.present = {p: g is not None or p in self._carried for p, g in gradients.items()}
        layout = FlatLayout.of([p.cut.part(p.form).cast(wide_dtype(p.form.dtype)) for p in summed])
        flat = torch.empty(layout.nbytes, dtype=torch.uint8, device=self.axes.device)
        self._summed = dict(zip(summed, layout.views(flat), strict=True))
        self._traffic.reductions += 1
        self._over_shards(gradients)

    def issue_replicas(self) -> None:
        """Finish the sum over the shards, and issue the one over the replicas if it is wanted."""
        self._finish_works()
        for p, partial in self._partial.items():
            if p in self._summed:
                self._summed[p].add_(partial)
        self._partial = {}
        group = self.axes.replica
        if group.size > 1 and self._rules.sums_replicas:
            rows = [p.form.lying(row) for p, row in self._summed.items() if row.numel()]
            self._works = [group.sum(row) for row in rows]
            self._traffic.reduced_bytes += sum(row.nbytes for row in rows)

    def publish(self, told: Told) -> None:
        """Finish all sums, and set or add to ``.grad`` where any rank had a gradient."""
        self._finish_works()
        summed, self._summed = self._summed, {}
        if self.axes.replica.size > 1 and not self._rules.sums_replicas:
            self._partial = {p: row.clone() for p, row in summed.items()}
            self._carried |= {p for p in summed if self._was_used(p, told)}
            return
        divisor = self._rules.divisor or self.axes.shards * self.axes.replicas
        if divisor != 1 and summed:
            torch._foreach_div_(list(summed.values()), float(divisor))
        if self._rules.after_sum is not None and summed:
            self._hooked(summed)
        for p, row in summed.items():
            if self._was_used(p, told):
                self._put(p, row)
        self.present, self._carried, self._owed = {}, set(), set()

    def exchange_sparse(self) -> None:
        """Sum the gradients that are lists of rows, and put them into ``.grad``."""
        for p in self.parameters:
            if not (p.is_sparse and self._rules.sums and (p.trainable or p in self._owed)):
                continue
            gradient, p.full.grad = p.full.grad, None
            if gradient is not None and not gradient.is_sparse:
                gradient = gradient.to_sparse(1)
            dense = torch.zeros(p.local.shape, dtype=p.local.dtype, device=self.axes.device)
            rows, values = exchange_rows(gradient, p.shape, dense, self.axes.shard_reduce)
            dense.index_add_(0, rows, values)
            touched = torch.zeros(len(dense), device=dense.device)
            touched[rows] = 1
            for tensor in (dense, touched):
                if self.axes.replica.size > 1 and tensor.numel():
                    self.axes.replica.sum(tensor).wait()
            had = torch.tensor(float(gradient is not None), device=dense.device)
            for group in (self.axes.shard_reduce, self.axes.replica):
                group.sum(had).wait()
            if had > 0:
                divisor = self._rules.divisor or self.axes.shards * self.axes.replicas
                rows = touched.nonzero()[:, 0].to(p.local.device)
                touch(p.sharded, rows, anew=p.sharded.grad is None)
                self._put(p, dense.div_(divisor))
            self._traffic.reduced_bytes += values.nbytes

    def _was_used(self, p: ShardedParameter, told: Told) -> bool:
        return told.had(p, here=self.present.get(p, False))

    def _hooked(self, summed: dict[ShardedParameter, Tensor]) -> None:
        hook = self._rules.after_sum
        assert hook is not None
        flat = torch.cat([row.reshape(-1) for row in summed.values()])
        hook(flat)
        start = 0
        for row in summed.values():
            row.copy_(flat[start : start + row.numel()].view(row.shape))
            start += row.numel()

    def _put(self, p: ShardedParameter, row: Tensor) -> None:
        row = row if row.dtype == p.form.dtype else row.to(p.form.dtype)
        if self._rules.offload:
            row = row.to(p.local.device)
        if p.sharded.grad is None:
            p.sharded.grad = p.distribute(row)
        else:
            p.sharded.grad._local_tensor.add_(row)  # type: ignore[attr-defined]

    def _taken(self, p: ShardedParameter) -> Tensor | None:
        """What waits for ``p``, taken away, in the format in which it travels."""
        waiting, gradient = self._waiting.pop(p, None), p.full.grad
        p.full.grad = None
        if gradient is not None and isinstance(gradient, DTensor):
            gradient = p.local_gradient(gradient)
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        total = gradient if waiting is None else waiting
        if waiting is not None and gradient is not None:
            total = waiting.add_(gradient)
        return None if total is None else total.to(self._rules.sum_dtype(p.compute))

    def _waiting_dtype(self, p: ShardedParameter) -> torch.dtype:
        """Format in which gradients of ``p`` add up before they are summed over ranks."""
        return wide_dtype(p.compute) if not self._rules.sums else p.compute

    def _over_shards(self, gradients: dict[ShardedParameter, Tensor | None]) -> None:
        group = self.axes.shard_reduce
        full: list[Tensor] = []
        rows: list[Tensor] = []
        for p, gradient in gradients.items():
            row = self._summed[p]
            if group.size == 1 or p.is_scalar:
                row.zero_() if gradient is None else row.copy_(gradient)
                if group.size > 1:
                    self._works.append(group.sum(p.form.lying(row)))
                    self._traffic.reduced_bytes += row.nbytes
                continue
            full.append(self._travelling(p, gradient))
            rows.append(p.as_rows(row))
        if full:
            self._works.append(group.sum_scatter(full, rows))
            self._traffic.reduced_bytes += sum(tensor.nbytes for tensor in full)

    def _travelling(self, p: ShardedParameter, gradient: Tensor | None) -> Tensor:
        if gradient is None:
            dtype = self._rules.sum_dtype(p.compute)
            gradient = torch.zeros(p.shape, dtype=dtype, device=self.axes.device)
        return p.as_rows(gradient).contiguous()

    def _finish_works(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
