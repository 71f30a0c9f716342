"""One layer of the decoder, called slice by slice: attention, then the feed-forward, both pre-norm.

Projections give [B, n, H·D]; positions are turned in that layout, and the kernel reads heads
through a transposed view, whose output lies in memory as [B, n, H, D] again: no copy is made on the
way in or out.

Shapes: B sequences, n tokens of the slice, C channels, H query heads, H_kv key/value heads, D head
width.
"""

from typing import cast

import torch
from torch import Tensor, nn

from terashard.nn.attention import attend
from terashard.nn.carry import KeyValueCarry
from terashard.nn.mlp import GELU, SwiGLU
from terashard.nn.norm import RMSNorm
from terashard.nn.protocols import Carry, TokenSlice
from terashard.nn.rope import rotate
from terashard.spec.model import ModelSpec


class Attention(nn.Module):
    """Causal self-attention of a slice over the sequence so far, with grouped key/value heads."""

    def __init__(self, spec: ModelSpec, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.num_kv_heads = spec.num_kv_heads
        self.rope_theta = spec.rope_theta if spec.positions == "rotary" else None
        width, inner = spec.hidden_size, spec.num_heads * spec.head_dim
        grouped = spec.num_kv_heads * spec.head_dim
        self.query = nn.Linear(width, inner, bias=spec.bias, device=device)
        self.key = nn.Linear(width, grouped, bias=spec.bias, device=device)
        self.value = nn.Linear(width, grouped, bias=spec.bias, device=device)
        self.output = nn.Linear(inner, width, bias=spec.bias, device=device)

    def forward(self, x: Tensor, carry: KeyValueCarry | None, where: TokenSlice) -> Tensor:
        """[B, n, C] → [B, n, C]."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim))  # [B, n, H, D]
            for project in (self.query, self.key, self.value)
        )
        if self.rope_theta is not None:
            query = rotate(query, where, self.rope_theta)
            key = rotate(key, where, self.rope_theta)
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))  # [B, H, n, D]
        mixed = attend(query, key, value, carry, where)
        return cast(Tensor, self.output(mixed.transpose(1, 2).flatten(-2)))


class Block(nn.Module):
    """A pre-norm layer: a unit that slices meet in."""

    def __init__(self, spec: ModelSpec, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.attention_norm = new_norm(spec, device)
        self.attention = Attention(spec, device)
        self.mlp_norm = new_norm(spec, device)
        self.mlp = (SwiGLU if spec.activation == "swiglu" else GELU)(spec, device)

    def forward(self, x: Tensor, carry: Carry | None, where: TokenSlice) -> Tensor:
        """[B, n, C] → [B, n, C]; ``carry`` is of ``new_carry``, or None for a whole sequence."""
        assert carry is None or isinstance(carry, KeyValueCarry)
        x = x + self.attention(self.attention_norm(x), carry, where)
        return x + cast(Tensor, self.mlp(self.mlp_norm(x)))

    def new_carry(
        self, batch: int, length: int, *, device: torch.device, dtype: torch.dtype
    ) -> KeyValueCarry:
        """Keys and values of ``batch`` sequences of ``length`` tokens."""
        shape = (batch, self.attention.num_kv_heads, length, self.attention.head_dim)
        return KeyValueCarry(shape, device=device, dtype=dtype)


def new_norm(spec: ModelSpec, device: torch.device | str | None) -> nn.Module:
    """The norm that ``spec`` names; both compute in float32 at least."""
    if spec.norm == "rms":
        return RMSNorm(spec.hidden_size, spec.norm_eps, device)
    return nn.LayerNorm(spec.hidden_size, spec.norm_eps, device=device)
