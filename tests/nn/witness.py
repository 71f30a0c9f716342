"""A second decoder, written plainly from parameters by name, and slice-by-slice drivers for tests.

The decoder uses none of terashard's operators: softmax attention with a mask over the whole
sequence, norms and positions from their formulas, plain autograd.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from terashard.nn.decoder import DecoderStage
from terashard.nn.loss import loss_and_gradient
from terashard.nn.protocols import TokenSlice
from terashard.spec.model import ModelSpec

LLAMA = ModelSpec(
    vocab_size=29,
    hidden_size=24,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    mlp_size=40,
    max_length=16,
)
GPT2 = ModelSpec(
    vocab_size=29,
    hidden_size=24,
    num_layers=3,
    num_heads=3,
    num_kv_heads=3,
    head_dim=8,
    mlp_size=40,
    max_length=16,
    norm="layer",
    positions="learned",
    activation="gelu",
    bias=True,
)


def slices_of(lengths: Sequence[int]) -> list[TokenSlice]:
    cuts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return [
        TokenSlice(index=i, start=a, stop=b, total=cuts[-1])
        for i, (a, b) in enumerate(pairwise(cuts))
    ]


def plain_logits(spec: ModelSpec, p: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [B, N, V] of the whole sequence."""
    x = p["embed.tokens.weight"][tokens]
    if spec.positions == "learned":
        x = x + p["embed.positions.weight"][: tokens.shape[1]]
    for i in range(spec.num_layers):
        at = f"layers.{i}."
        x = x + _attention(spec, p, at + "attention.", _norm(spec, p, at + "attention_norm", x))
        x = x + _mlp(spec, p, at + "mlp.", _norm(spec, p, at + "mlp_norm", x))
    output = p["embed.tokens.weight"] if spec.tied else p["head.output.weight"]
    return _norm(spec, p, "head.norm", x) @ output.T


def _linear(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ p[name + ".weight"].T
    return y + p[name + ".bias"] if name + ".bias" in p else y


def _norm(spec: ModelSpec, p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    if spec.norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + spec.norm_eps).sqrt()
    x = x * p[name + ".weight"]
    return x + p[name + ".bias"] if spec.norm == "layer" else x


def _turn(spec: ModelSpec, x: Tensor) -> Tensor:
    half = spec.head_dim // 2
    frequency = 1.0 / spec.rope_theta ** (torch.arange(0, spec.head_dim, 2).float() / spec.head_dim)
    angle = (torch.arange(x.shape[2]).float()[:, None] * frequency).double()
    pair = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pair.real, pair.imag], -1)


def _attention(spec: ModelSpec, p: Mapping[str, Tensor], at: str, x: Tensor) -> Tensor:
    batch, length, _ = x.shape
    heads = [
        _linear(p, at + n, x).view(batch, length, -1, spec.head_dim)
        for n in ("query", "key", "value")
    ]
    query, key, value = (h.transpose(1, 2) for h in heads)
    if spec.positions == "rotary":
        query, key = _turn(spec, query), _turn(spec, key)
    repeat = spec.num_heads // spec.num_kv_heads
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.mT / spec.head_dim**0.5
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
    return _linear(p, at + "output", mixed.transpose(1, 2).reshape(batch, length, -1))


def _mlp(spec: ModelSpec, p: Mapping[str, Tensor], at: str, x: Tensor) -> Tensor:
    up = _linear(p, at + "up", x)
    if spec.activation == "swiglu":
        gate = _linear(p, at + "gate", x)
        return _linear(p, at + "down", gate * torch.sigmoid(gate) * up)
    return _linear(p, at + "down", F.gelu(up, approximate="tanh"))


def run_in_slices(
    stages: Sequence[DecoderStage],
    tokens: Tensor,
    targets: Tensor,
    lengths: Sequence[int],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Drive units by hand, slices forward upward, backward downward; returns the loss sum."""
    units = [(name, unit) for stage in stages for name, unit in stage.units()]
    *body, (_, head) = units
    dtype = next(head.parameters()).dtype
    batch, total = tokens.shape
    carries = [u.new_carry(batch, total, device=tokens.device, dtype=dtype) for _, u in body]
    kept, value = [], tokens.new_zeros((), dtype=torch.float64)
    for where in slices_of(lengths):
        x = tokens[:, where.start : where.stop]
        for (_, unit), carry in zip(body, carries, strict=True):
            x = unit(x, carry, where)
        part, gradient = loss_and_gradient(head, x, targets[:, where.start : where.stop], loss)
        value = value + part
        kept.append((where, x, gradient))
    for where, x, gradient in reversed(kept):
        torch.autograd.backward(x, gradient)
        for carry in carries:
            if carry is not None:
                assert not carry.roots(where.index)
                carry.forget(where.index)
    return value


def largest_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Worst max|Δ| / max(max|expected|, 1e-6·G) over parameters, G the model's largest gradient."""
    assert found.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    return max(
        float((found[n] - g).abs().max()) / max(float(g.abs().max()), 1e-6 * largest)
        for n, g in expected.items()
    )


def recompute_in_slices(
    stage: DecoderStage,
    tokens: Tensor,
    cotangent: Tensor,
    lengths: Sequence[int],
) -> None:
    """As above, keeping no graph: each slice runs forward again right before its backward."""
    units = [unit for name, unit in stage.units() if name != "head"]
    batch, total = tokens.shape
    carries = [
        u.new_carry(batch, total, device=tokens.device, dtype=cotangent.dtype) for u in units
    ]

    def forward(where: TokenSlice) -> Tensor:
        x = tokens[:, where.start : where.stop]
        for unit, carry in zip(units, carries, strict=True):
            x = unit(x, carry, where)
        return x

    with torch.no_grad():
        for where in slices_of(lengths):
            forward(where)
    for where in reversed(slices_of(lengths)):
        x = forward(replace(where, recompute=True))
        torch.autograd.backward(x, cotangent[:, where.start : where.stop])
