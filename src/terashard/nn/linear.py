r"""A Linear whose weight gradient is computed once, over all slices and micro-batches of a step.

::

    backward of a slice     dx = dy W now; (x, dy) is put aside
    end of the step         dW = dYᵀ X over everything that was put aside, in one product

Instead of a full gradient, what was put aside is held: inputs, which autograd holds anyway until
the slice's backward, and output gradients. The bias has its ordinary gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F


class Stash:
    """Inputs and output gradients of one Linear, [tokens, in] and [tokens, out] by slice."""

    def __init__(self) -> None:
        self._inputs: list[Tensor] = []
        self._gradients: list[Tensor] = []

    def add(self, x: Tensor, dy: Tensor) -> None:
        """Put aside what one slice contributes; slices come last to first."""
        self._inputs.append(x.reshape(-1, x.shape[-1]))
        self._gradients.append(dy.reshape(-1, dy.shape[-1]))

    def clear(self) -> None:
        """Forget everything."""
        self._inputs, self._gradients = [], []

    def take(self, dtype: torch.dtype) -> Tensor | None:
        """The weight's gradient [out, in] in ``dtype``, and forget; None if nothing came."""
        inputs, gradients = self._inputs[::-1], self._gradients[::-1]
        self.clear()
        if not inputs:
            return None
        if inputs[0].dtype == dtype:
            return torch.cat(gradients).T @ torch.cat(inputs)
        total = torch.zeros(gradients[0].shape[1], inputs[0].shape[1], dtype=dtype)
        total = total.to(inputs[0].device)
        for x, dy in zip(inputs, gradients, strict=True):
            total.addmm_(dy.to(dtype).T, x.to(dtype))
        return total


class _Put(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stash: Stash) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stash = stash
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.stash.add(x, dy)
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return dx, None, db, None


class StashingLinear(nn.Linear):
    """``nn.Linear``, but for its weight's gradient, which ``stash`` gives."""

    stash: Stash

    def forward(self, input: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        if torch.is_grad_enabled() and self.weight.requires_grad:
            out: Tensor = _Put.apply(input, self.weight, self.bias, self.stash)  # type: ignore[no-untyped-call]
            return out
        return F.linear(input, self.weight, self.bias)


def stash_linears(modules: Sequence[nn.Module]) -> dict[nn.Module, Stash]:
    """Let every exact ``nn.Linear`` in ``modules`` put aside; the module → where.

    One whose weight stands in other modules too keeps its ordinary gradient.
    """
    linears = [m for module in modules for m in module.modules() if type(m) is nn.Linear]
    held = [p for module in modules for m in module.modules() for p in m._parameters.values()]
    found: dict[nn.Module, Stash] = {}
    for linear in dict.fromkeys(linears):
        if sum(p is linear.weight for p in held) == 1:
            linear.__class__ = StashingLinear
            assert isinstance(linear, StashingLinear)
            linear.stash = found[linear] = Stash()
    return found
