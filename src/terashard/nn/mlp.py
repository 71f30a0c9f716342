r"""The two feed-forward halves of a layer.

    SwiGLU:  y = W_down (silu(W_gate x) · W_up x)
    GELU:    y = W_down gelu(W_up x + b) + b′,    gelu in GPT-2's tanh form

The product of SwiGLU is an autograd function of its own: it keeps gate and up alone and computes
``silu(gate)`` again in the backward, one tensor of [B, n, M] less per layer for a few percent of an
elementwise pass.

Shapes: B sequences, n tokens, C channels, M inner width; x, y [B, n, C].
Source: GLU variants (arXiv:2002.05202); Gaussian error linear units (arXiv:1606.08415).
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from terashard.spec.model import ModelSpec


class SwiGLU(nn.Module):
    """Gated feed-forward: gate, up, down."""

    def __init__(self, spec: ModelSpec, device: torch.device | str | None = None) -> None:
        super().__init__()
        width, inner, bias = spec.hidden_size, spec.mlp_size, spec.bias
        self.gate = nn.Linear(width, inner, bias=bias, device=device)
        self.up = nn.Linear(width, inner, bias=bias, device=device)
        self.down = nn.Linear(inner, width, bias=bias, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, C] → [B, n, C]."""
        inner = _SiluProduct.apply(self.gate(x), self.up(x))  # type: ignore[no-untyped-call]
        return cast(Tensor, self.down(inner))


class GELU(nn.Module):
    """Plain feed-forward: up, GELU in its tanh form, down."""

    def __init__(self, spec: ModelSpec, device: torch.device | str | None = None) -> None:
        super().__init__()
        width, inner, bias = spec.hidden_size, spec.mlp_size, spec.bias
        self.up = nn.Linear(width, inner, bias=bias, device=device)
        self.down = nn.Linear(inner, width, bias=bias, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, C] → [B, n, C]."""
        return cast(Tensor, self.down(F.gelu(self.up(x), approximate="tanh")))


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return d_gate, F.silu(gate).mul_(grad)
