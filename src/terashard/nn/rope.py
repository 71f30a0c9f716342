r"""Rotary positions, half rotation: channel i turns with channel i + D/2.

    (a, b) ↦ (a cos φ − b sin φ, b cos φ + a sin φ),    φ = position · θ^(−2i/D),    i < D/2

Angles are float32, as in every published model; their cosines are taken in float64 and rounded
once, so that they depend on the position alone, never on where a slice begins. No buffer of a
module holds them: they are no state, and a model built on meta would leave them unwritten.

Shapes: B sequences, n tokens, H heads, D head width; x [B, n, H, D], cosine and sine [n, 1, D/2].
Source: RoFormer (arXiv:2104.09864).
"""

from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from terashard.nn.protocols import TokenSlice


@lru_cache(maxsize=16)
def _table(
    length: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False), torch.no_grad():
        channel = torch.arange(0, head_dim, 2, dtype=torch.float32)
        frequency = 1.0 / theta ** (channel / head_dim)
        angle = torch.arange(length, dtype=torch.float32).outer(frequency).double().unsqueeze(1)
        return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def rotate(x: Tensor, where: TokenSlice, theta: float) -> Tensor:
    """Turn the heads [B, n, H, D] of tokens ``[where.start, where.stop)`` by their positions."""
    cosine, sine = _table(where.total, x.shape[-1], theta, x.device, x.dtype)
    cosine, sine = cosine[where.start : where.stop], sine[where.start : where.stop]
    return cast(Tensor, _Rotate.apply(x, cosine, sine))  # type: ignore[no-untyped-call]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _turn(x, cosine, sine, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _turn(grad, cosine, sine, -1), None, None


def _turn(x: Tensor, cosine: Tensor, sine: Tensor, direction: int) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    turned = torch.empty_like(x, memory_format=torch.contiguous_format)
    left, right = turned.chunk(2, dim=-1)
    torch.mul(a, cosine, out=left).addcmul_(b, sine, value=-direction)
    torch.mul(b, cosine, out=right).addcmul_(a, sine, value=direction)
    return turned
