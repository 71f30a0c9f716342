r"""Attention of one token slice over a prefix: the kernels, forward and backward, by device.

Query ``i`` of a slice that starts at token ``p`` sees keys ``j ≤ p + i``:

    o_i = Σ_j e^{s_ij − z_i} v_j,    s_ij = q_i·k_j / √D,    z_i = log Σ_j e^{s_ij}

Two kernels see parts of the keys and are merged by their ``z``. With ``w = e^{z_1 − z}``, ``z`` the
sum's logarithm: ``o = w·o_1 + (1 − w)·o_2``. The backward needs no merge. With ``δ_i = do_i·o_i``,
and the *global* ``o`` and ``z``,

    ds_ij = e^{s_ij − z_i} (do_i·v_j − δ_i)

is right for every part of the keys by itself.

Shapes: B sequences, H query heads, H_kv key/value heads (H a multiple), n tokens of the slice, p
before it, D head width. query [B, H, n, D]; key, value [B, H_kv, p + n, D]; z [B, H, n].
Source: FlashAttention-2 (arXiv:2307.08691).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

_aten = torch.ops.aten


class Attended(NamedTuple):
    """Output [B, H, n, D], and what else the backward needs: ``z`` first, as the kernel has it."""

    output: Tensor
    state: tuple[Tensor, ...]


class Gradients(NamedTuple):
    """Gradients of query, of the prefix's key and value [B, H_kv, p, D], and of the slice's own."""

    query: Tensor
    prefix: tuple[Tensor, Tensor] | None
    own: tuple[Tensor, Tensor]


class Operands(NamedTuple):
    """Query of a slice, keys and values up to its end, and where it starts."""

    query: Tensor
    key: Tensor
    value: Tensor
    start: int


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute attention: a forward, and its backward (grad, operands, attended)."""

    name: str
    forward: Callable[[Operands], Attended]
    backward: Callable[[Tensor, Operands, Attended], Gradients]


def choose(device: torch.device, dtype: torch.dtype, head_dim: int) -> Backend:
    """The fastest backend that computes exactly what is asked; the plain one where no other can."""
    if device.type == "cpu" and dtype.is_floating_point:
        return CPU_FLASH
    if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
        return CUDA_FLASH if head_dim % 8 == 0 and head_dim <= 256 else MATH
    if device.type == "cuda" and dtype == torch.float32 and head_dim % 4 == 0:
        return CUDA_EFFICIENT
    return MATH


def _gradients(query: Tensor, key: Tensor, value: Tensor, start: int) -> Gradients:
    prefix = (key[:, :, :start], value[:, :, :start]) if start else None
    return Gradients(query, prefix, (key[:, :, start:], value[:, :, start:]))


# CPU: the prefix without a mask and the slice's own tokens with one, so that no work is done on
# what is masked out.


def _cpu_forward(ops: Operands) -> Attended:
    flash = _aten._scaled_dot_product_flash_attention_for_cpu
    query, key, value, p = ops
    output, z = flash(query, key[:, :, p:], value[:, :, p:], 0.0, True)
    if p == 0:
        return Attended(output, (z,))
    earlier, z_earlier = flash(query, key[:, :, :p], value[:, :, :p], 0.0, False)
    weight = torch.sigmoid(z_earlier - z).unsqueeze(-1)
    merged = output.to(z.dtype).lerp_(earlier.to(z.dtype), weight)
    return Attended(merged.to(query.dtype), (torch.logaddexp(z, z_earlier),))


def _cpu_backward(grad: Tensor, ops: Operands, attended: Attended) -> Gradients:
    flash = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    query, key, value, p = ops
    output, (z,) = attended
    d_query, *own = flash(grad, query, key[:, :, p:], value[:, :, p:], output, z, 0.0, True)
    if p == 0:
        return Gradients(d_query, None, (own[0], own[1]))
    earlier, *prefix = flash(grad, query, key[:, :, :p], value[:, :, :p], output, z, 0.0, False)
    return Gradients(d_query.add_(earlier), (prefix[0], prefix[1]), (own[0], own[1]))


# Plain: any device, any type; the whole [n, p + n] matrix exists, in the wider of float32 and the
# operands' type.


def _scores(ops: Operands) -> Tensor:
    query, key, _, p = ops
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = torch.unflatten(query.to(wide), 1, (key.shape[1], -1)) * query.shape[-1] ** -0.5
    scores = grouped @ key.to(wide).unsqueeze(2).mT  # [B, H_kv, H / H_kv, n, p + n]
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(p + 1)
    return cast(Tensor, scores.masked_fill_(later, -torch.inf))


def _math_forward(ops: Operands) -> Attended:
    scores = _scores(ops)
    z = scores.logsumexp(-1, keepdim=True)
    output = (scores - z).exp_() @ ops.value.to(scores.dtype).unsqueeze(2)
    return Attended(output.flatten(1, 2).to(ops.query.dtype), (z,))


def _math_backward(grad: Tensor, ops: Operands, attended: Attended) -> Gradients:
    query, key, value, p = ops
    weights = (_scores(ops) - attended.state[0]).exp_()
    wide = weights.dtype
    groups = (key.shape[1], -1)
    d_output, output, grouped = (
        torch.unflatten(x.to(wide), 1, groups) for x in (grad, attended.output, query)
    )
    delta = (d_output * output).sum(-1, keepdim=True)
    d_scores = (d_output @ value.to(wide).unsqueeze(2).mT).sub_(delta).mul_(weights)
    d_scores.mul_(query.shape[-1] ** -0.5)
    d_query = (d_scores @ key.to(wide).unsqueeze(2)).flatten(1, 2)
    d_key = (d_scores.mT @ grouped).sum(2)
    d_value = (weights.mT @ d_output).sum(2)
    dtype = query.dtype
    return _gradients(d_query.to(dtype), d_key.to(dtype), d_value.to(dtype), p)


# CUDA. [Note: not run here] Both backends were written from torch's documented operators on a
# machine without a GPU; the self-check at start-up stands between them and a run. ``is_causal`` of
# the CUDA flash operator means bottom-right alignment (what
# ``torch.nn.attention.bias.causal_lower_right`` relies on), mask type 2 of the other the same.
# Key/value heads are repeated: whether the operators sum over a group in their backward differs
# between releases.

_BOTTOM_RIGHT = 2


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _grouped_sum(x: Tensor, kv_heads: int) -> Tensor:
    return x if x.shape[1] == kv_heads else torch.unflatten(x, 1, (kv_heads, -1)).sum(2)


def _cuda_flash_forward(ops: Operands) -> Attended:
    key, value = (_repeated(x, ops.query.shape[1]) for x in (ops.key, ops.value))
    result = _aten._scaled_dot_product_flash_attention(ops.query, key, value, 0.0, True)
    return Attended(result[0], (result[1], result[6], result[7]))


def _cuda_flash_backward(grad: Tensor, ops: Operands, attended: Attended) -> Gradients:
    query, p, kv_heads = ops.query, ops.start, ops.key.shape[1]
    key, value = (_repeated(x, query.shape[1]) for x in (ops.key, ops.value))
    z, seed, offset = attended.state
    lengths = (None, None, query.shape[2], key.shape[2])
    d_query, d_key, d_value = _aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, attended.output, z, *lengths, 0.0, True, seed, offset
    )
    return _gradients(d_query, _grouped_sum(d_key, kv_heads), _grouped_sum(d_value, kv_heads), p)


def _cuda_efficient_forward(ops: Operands) -> Attended:
    heads = ops.query.shape[1]
    operands = (
        x.transpose(1, 2)
        for x in (ops.query, _repeated(ops.key, heads), _repeated(ops.value, heads))
    )
    output, z, seed, offset, *_ = _aten._efficient_attention_forward(
        *operands, None, None, None, None, None, 0.0, _BOTTOM_RIGHT, True
    )
    return Attended(output.transpose(1, 2), (z, seed, offset))


def _cuda_efficient_backward(grad: Tensor, ops: Operands, attended: Attended) -> Gradients:
    heads, kv_heads = ops.query.shape[1], ops.key.shape[1]
    d_output, query, key, value, output = (
        x.transpose(1, 2)
        for x in (
            grad,
            ops.query,
            _repeated(ops.key, heads),
            _repeated(ops.value, heads),
            attended.output,
        )
    )
    z, seed, offset = attended.state
    lengths = (None, None, query.shape[1], key.shape[1])
    d_query, d_key, d_value, _ = _aten._efficient_attention_backward(
        d_output,
        query,
        key,
        value,
        None,
        output,
        *lengths,
        z,
        0.0,
        seed,
        offset,
        _BOTTOM_RIGHT,
        False,
    )
    d_query, d_key, d_value = (x.transpose(1, 2) for x in (d_query, d_key, d_value))
    d_key, d_value = _grouped_sum(d_key, kv_heads), _grouped_sum(d_value, kv_heads)
    return _gradients(d_query, d_key, d_value, ops.start)


CPU_FLASH = Backend("cpu_flash", _cpu_forward, _cpu_backward)
MATH = Backend("math", _math_forward, _math_backward)
CUDA_FLASH = Backend("cuda_flash", _cuda_flash_forward, _cuda_flash_backward)
CUDA_EFFICIENT = Backend("cuda_efficient", _cuda_efficient_forward, _cuda_efficient_backward)
