"""The last unit: final norm and the projection to the vocabulary.

Shapes: T tokens in any arrangement, C channels, V words; x [..., C], logits [..., V].
"""

from typing import cast

import torch
from torch import Tensor, nn

from terashard.nn.block import new_norm
from terashard.spec.model import ModelSpec


class Head(nn.Module):
    """Hidden states to logits, called together with the loss on a chunk of tokens."""

    def __init__(self, spec: ModelSpec, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.norm = new_norm(spec, device)
        self.output = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] → [..., V]."""
        return cast(Tensor, self.output(self.norm(x)))
