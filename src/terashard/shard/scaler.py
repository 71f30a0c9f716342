"""A gradient scaler for float16 whose verdict is the same on all ranks.

torch's scaler looks at this rank's gradients. Of sharded ones each rank has other rows, so one may
find an infinity and skip the step while the others take it. Here the finding is summed over the
ranks before anybody decides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.distributed.tensor import DTensor

from terashard.comm.collectives import add_up


class ShardedGradScaler(GradScaler):
    """``torch.amp.GradScaler`` for DTensor gradients; all ranks must step alike."""

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Unscale this rank's parts, and find out together whether all of them are finite."""
        found = torch.zeros((), dtype=torch.float32, device=found_inf.device)
        with torch.no_grad():
            for gradient in _gradients(optimizer):
                gradient.mul_(inv_scale.to(gradient.device, gradient.dtype))
                if gradient.numel():
                    found += (~torch.isfinite(gradient)).any()
        add_up(found)
        return {found.device: found.clamp_(max=1.0)}

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step if all ranks' gradients are finite, else skip; the same decision everywhere."""
        state = self._per_optimizer_states[id(optimizer)]
        if self._enabled and state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None:
                found.append(gradient._local_tensor if isinstance(gradient, DTensor) else gradient)
    return found
