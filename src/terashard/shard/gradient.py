r"""The gradients of one unit: full-size accumulators, and the rows of their sum that stay.

Autograd adds the contribution of every slice and micro-batch to the full accumulator of a
parameter, in the master format. If parameters compute in that format, ``full.grad`` *is* the
accumulator and nothing is copied; otherwise a hook adds each contribution as it comes and drops it.
A reduction then leaves this rank's rows of the sum over ranks in ``rows``, over which
``sharded.grad`` is a DTensor. With one shard the rows are the accumulators themselves.

Nothing is averaged: the loss is already divided by the global number of target tokens.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from terashard.shard.axes import Axes
from terashard.shard.flat import FlatLayout, Form
from terashard.shard.param import ShardedParameter
from terashard.shard.precision import Precision


class Gradients:
    """Gradient memory of the trainable ``parameters`` of a unit, allocated at birth and kept."""

    def __init__(
        self, parameters: Sequence[ShardedParameter], *, axes: Axes, precision: Precision
    ) -> None:
        self.parameters = tuple(parameters)
        self._in_place = precision.compute == precision.master
        self.flat_full, self.full = _zeros([p.shape for p in parameters], axes, precision)
        if axes.shards == 1:
            self.flat_rows, self.rows = self.flat_full, self.full
        else:
            shapes = [p.local_shape for p in parameters]
            self.flat_rows, self.rows = _zeros(shapes, axes, precision)
        self._public = [p.distribute(rows) for p, rows in zip(parameters, self.rows, strict=True)]
        if not self._in_place:
            for parameter, accumulator in zip(parameters, self.full, strict=True):
                hook = _adder(accumulator)
                parameter.full.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def zero(self) -> None:
        """Forget all contributions, and have autograd accumulate here."""
        self.flat_full.zero_()
        for parameter, accumulator in zip(self.parameters, self.full, strict=True):
            parameter.full.grad = accumulator if self._in_place else None

    def publish(self) -> None:
        """Set the gradients of the public parameters to the rows."""
        for parameter, gradient in zip(self.parameters, self._public, strict=True):
            parameter.sharded.grad = gradient

    def pairs(self, *, scalar: bool) -> list[tuple[Tensor, Tensor]]:
        """Accumulator and rows of every parameter that is, or is not, 0-dim."""
        return [
            (full, rows)
            for p, full, rows in zip(self.parameters, self.full, self.rows, strict=True)
            if p.is_scalar is scalar
        ]

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


def _adder(accumulator: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            accumulator.add_(gradient)

    return add
