r"""The gradients of one unit: where contributions add up, and the rows of their sum that stay.

Autograd adds the contribution of every slice and micro-batch to a full accumulator of the
parameter, in the master format. If parameters compute in that format, ``full.grad`` *is* the
accumulator and nothing is copied; otherwise a hook adds each contribution as it comes and drops it.
A reduction then leaves this rank's rows of the sum over ranks in ``rows``, over which
``sharded.grad`` is a DTensor.

Accumulators are *kept* from step to step when there is one sum per step, and *passing* when there
is one after every micro-batch. With a *stash*, weights of linear layers have none: their gradient
is one product at the end of the step::

    kept      full, allocated at birth       ── sum over shards ─────────────> rows
    passing   made by the first contribution ── sum over shards ─> arrived ─(+)─> rows
              let go when the sum is there
    stash     (x, dy) of every slice ──> dYᵀX ── sum over shards ─> arrived ─(+)─> rows

Nothing is averaged: the loss is already divided by the global number of target tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from terashard.shard.axes import Axes
from terashard.shard.flat import FlatLayout, Form
from terashard.shard.param import ShardedParameter
from terashard.shard.precision import Precision


class WeightStash(Protocol):
    """What slices left of one weight's gradient."""

    def clear(self) -> None:
        """Forget everything."""

    def take(self, dtype: torch.dtype) -> Tensor | None:
        """The full gradient in ``dtype``, and forget; None if nothing came."""


class Gradients(ABC):
    """Gradient memory of the trainable ``parameters`` of a unit."""

    flat_rows: Tensor
    rows: list[Tensor]

    def __init__(self, parameters: Sequence[ShardedParameter], precision: Precision) -> None:
        self.parameters = tuple(parameters)
        self._in_place = precision.compute == precision.master

    @abstractmethod
    def zero(self) -> None:
        """Forget all contributions, and have autograd accumulate anew."""

    @abstractmethod
    def take(self) -> list[tuple[Tensor, Tensor]]:
        """By parameter: what has come together, and where its summed rows go.

        A sum over shards reads the former and writes the latter, until ``landed``.
        """

    def landed(self) -> None:
        """The sum over shards of what was taken is there."""
        return

    def alone(self) -> None:
        """There are no other shards, so what has come together is the sum."""
        return

    def publish(self) -> None:
        """Set the gradients of the public parameters to the rows."""
        for parameter, gradient in zip(self.parameters, self._public, strict=True):
            parameter.sharded.grad = gradient

    def tied_rows(self) -> list[Tensor]:
        """Rows of the tied parameters, in the order of the lesser of the two names.

        Both stages agree on that order, so they issue their sums alike.
        """
        named = [
            (min(p.name, p.tied_to), rows)
            for p, rows in zip(self.parameters, self.rows, strict=True)
            if p.tied_to is not None
        ]
        return [rows for _, rows in sorted(named, key=lambda pair: pair[0])]

    def _keep(self, flat_rows: Tensor, rows: list[Tensor]) -> None:
        self.flat_rows, self.rows = flat_rows, rows
        self._public = [p.distribute(r) for p, r in zip(self.parameters, rows, strict=True)]


class KeptGradients(Gradients):
    """Full accumulators, allocated at birth; with one shard the rows are these themselves."""

    def __init__(
        self, parameters: Sequence[ShardedParameter], *, axes: Axes, precision: Precision
    ) -> None:
        super().__init__(parameters, precision)
        self.flat_full, self.full = _zeros([p.shape for p in parameters], axes, precision)
        if axes.shards == 1:
            self._keep(self.flat_full, self.full)
        else:
            self._keep(*_zeros([p.local_shape for p in parameters], axes, precision))
        if not self._in_place:
            for parameter, accumulator in zip(parameters, self.full, strict=True):
                _collect(parameter, accumulator.add_)

    def zero(self) -> None:
        """See ``Gradients``."""
        self.flat_full.zero_()
        for parameter, accumulator in zip(self.parameters, self.full, strict=True):
            parameter.full.grad = accumulator if self._in_place else None

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """See ``Gradients``."""
        return list(zip(self.full, self.rows, strict=True))


class PassingGradients(Gradients):
    """Full accumulators that live from a contribution to the next sum over shards."""

    def __init__(
        self, parameters: Sequence[ShardedParameter], *, axes: Axes, precision: Precision
    ) -> None:
        super().__init__(parameters, precision)
        shapes = [p.local_shape for p in parameters]
        self._keep(*_zeros(shapes, axes, precision))
        self._flat_arrived, self._arrived = _zeros(shapes, axes, precision)
        self._master = precision.master
        self._wide: dict[ShardedParameter, Tensor] = {}
        if not self._in_place:
            for parameter in parameters:
                _collect(parameter, _Adder(parameter, self._wide, precision.master))

    def zero(self) -> None:
        """See ``Gradients``."""
        self.flat_rows.zero_()
        self._wide.clear()
        for parameter in self.parameters:
            parameter.full.grad = None

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """See ``Gradients``."""
        return list(zip(map(self._taken, self.parameters), self._arrived, strict=True))

    def landed(self) -> None:
        """See ``Gradients``."""
        self.flat_rows.add_(self._flat_arrived)

    def alone(self) -> None:
        """See ``Gradients``."""
        for full, arrived in self.take():
            arrived.copy_(full)
        self.landed()

    def _taken(self, parameter: ShardedParameter) -> Tensor:
        found = self._wide.pop(parameter, None)
        if self._in_place:
            found, parameter.full.grad = parameter.full.grad, None
        if found is None:
            return parameter.full.new_zeros(parameter.shape, dtype=self._master)
        return found.contiguous()


class StashedGradients(PassingGradients):
    """Gradients of which some are computed from a stash, once, when they are taken."""

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        *,
        axes: Axes,
        precision: Precision,
        stashes: Mapping[ShardedParameter, WeightStash],
    ) -> None:
        super().__init__(parameters, axes=axes, precision=precision)
        self._stashes = stashes

    def zero(self) -> None:
        """See ``Gradients``."""
        super().zero()
        for stash in self._stashes.values():
            stash.clear()

    def _taken(self, parameter: ShardedParameter) -> Tensor:
        stash = self._stashes.get(parameter)
        product = None if stash is None else stash.take(self._master)
        return super()._taken(parameter) if product is None else product


class _Adder:
    """Adds contributions to one parameter up in the master format."""

    def __init__(
        self,
        parameter: ShardedParameter,
        wide: dict[ShardedParameter, Tensor],
        master: torch.dtype,
    ) -> None:
        self._parameter, self._wide, self._master = parameter, wide, master

    def __call__(self, gradient: Tensor) -> None:
        if self._parameter in self._wide:
            self._wide[self._parameter].add_(gradient)
        else:
            self._wide[self._parameter] = gradient.to(self._master)


def flat_numel(shapes: Sequence[torch.Size], precision: Precision) -> int:
    """Elements of a flat buffer of gradients of these shapes, with what lies between them."""
    return _layout(shapes, precision).nbytes // precision.master.itemsize


def _layout(shapes: Sequence[torch.Size], precision: Precision) -> FlatLayout:
    return FlatLayout.of([Form.plain(shape, precision.master) for shape in shapes])


def _zeros(
    shapes: Sequence[torch.Size], axes: Axes, precision: Precision
) -> tuple[Tensor, list[Tensor]]:
    layout = _layout(shapes, precision)
    raw = layout.zeros(axes.device)
    with torch.inference_mode(False):
        return raw.view(precision.master), layout.views(raw)


def _collect(parameter: ShardedParameter, take: Callable[[Tensor], object]) -> None:
    """Hand every contribution of ``parameter`` to ``take``, and drop it."""

    def collect(leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:
            take(gradient)

    parameter.full.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
