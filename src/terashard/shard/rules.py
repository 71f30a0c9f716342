"""What may be chosen for a unit that is sharded by itself: when it stays full, what is summed, how.

Every ``set_…`` method of a sharded module changes one of these; they are read when they matter, so
a change holds from the next forward or backward on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

Pool = Literal["static", "any", "off"]
"""Where full parameters lie: always in one slot, in any free one, or in memory of their own."""


@dataclass(slots=True, kw_only=True)
class Rules:
    """The choices of one unit."""

    precision: MixedPrecisionPolicy
    reshard_after_forward: bool | int | None = None
    """None: unless the unit is the root's."""
    is_default: bool = False
    """Whether the choice above was the root's default, and holds while gradients are wanted."""
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    max_flying: int = 2
    """Sums that may be on their way before the oldest is waited for."""
    sums: bool = True
    """Whether a backward ends with a sum over the ranks, or gradients wait unsharded."""
    sums_replicas: bool = True
    """Whether that sum goes over replicas too, or waits as partial sums of the shards."""
    divisor: float | None = None
    """What a summed gradient is divided by; None: the number of data-parallel ranks."""
    sums_unused: bool | None = None
    """Whether parameters without a gradient here take part with zeros; False: the caller promises
    that all ranks use the same parameters."""
    offload: bool = False
    """Whether the kept part lives in host memory."""
    after_sum: Callable[[Tensor], None] | None = None
    """Called with the summed parts of the unit, flat, before they become gradients."""

    def compute_dtype(self, kept: torch.dtype) -> torch.dtype:
        """Format in which a parameter kept in ``kept`` computes."""
        wanted = self.precision.param_dtype
        return kept if wanted is None or not kept.is_floating_point else wanted

    def sum_dtype(self, compute: torch.dtype) -> torch.dtype:
        """Format in which a gradient of a parameter that computes in ``compute`` travels."""
        wanted = self.precision.reduce_dtype
        return compute if wanted is None or not compute.is_floating_point else wanted
