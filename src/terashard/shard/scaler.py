"""A gradient scaler for float16 whose verdict is the same on all ranks.

torch's scaler looks at this rank's gradients. Of sharded ones each rank has other rows, so one may
find an infinity and skip the step while the others take it. Here the finding is summed over the
ranks before anybody decides. A rank may have no rows, or no gradients, and still takes part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor

from terashard.comm.collectives import add_up


class ShardedGradScaler(GradScaler):
    """``torch.amp.GradScaler`` for DTensor gradients; all ranks must step alike.

    All ranks step, or all of them skip the step, fused optimizers that unscale by themselves too.
    ``process_group``: the ranks that decide together, all by default. It holds every rank that
    keeps a part of the model, the stages of a pipeline among them.
    """

    def __init__(
        self, *args: Any, process_group: dist.ProcessGroup | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.process_group = process_group

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Unscale this rank's parts, and find out together whether all of them are finite.

        torch calls it in ``unscale_``, else in ``step``, there with 1 for optimizers that unscale.
        """
        found = torch.zeros((), dtype=torch.float32, device=found_inf.device)
        with torch.no_grad():
            for gradient in _gradients(optimizer):
                if gradient.dtype == torch.float16 and not allow_fp16:
                    raise ValueError(
                        "gradients in float16 cannot be unscaled, as small ones would become zero;"
                        " keep parameters in float32 and compute in float16, with"
                        " MixedPrecisionPolicy(param_dtype=torch.float16)"
                    )
                gradient.mul_(inv_scale.to(gradient.device, gradient.dtype))
                found += (~torch.isfinite(gradient)).any()
        add_up(found, self.process_group)
        return {found.device: found.clamp_(max=1.0)}


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """What this rank has of every gradient; of a list of rows, the values."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                yield gradient._local_tensor
            elif gradient is not None and gradient.is_sparse:
                parameter.grad = gradient.coalesce()  # rows that stand twice may overflow together
                yield parameter.grad._values()
            elif gradient is not None:
                yield gradient
