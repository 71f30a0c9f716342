r"""Causal attention of one token slice over its prefix, with exact gradients.

The keys and values of a sequence live in one buffer of the carry, outside autograd's sight: each
slice writes its rows in place, which autograd would refuse for tensors it keeps. So one autograd
function does both ways by hand. Forward writes rows ``[p, p + n)`` and attends over ``[0, p + n)``.
Backward computes the gradients of the same rows, leaves those of ``[0, p)`` in the carry for
earlier slices, and returns those of ``[p, p + n)`` together with what later slices left there.
Autograd keeps the query, the output and the log-sum-exp alone.

This is right when the slices of a sequence run forward upward and backward downward; the stage sees
to that.

Shapes: query [B, H, n, D], key and value [B, H_kv, n, D], output [B, H, n, D].
Source: TeraPipe (arXiv:2102.07988).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from terashard.errors import RunError
from terashard.nn.carry import KeyValueCarry
from terashard.nn.kernels import Attended, Backend, Operands, choose
from terashard.nn.protocols import TokenSlice

_CHECK_CUTS = {"cpu": (0, 33, 34, 70), "cuda": (0, 129, 130, 300)}
"""Ends of slices: none at the edge of a kernel's tile (32 queries; 64 or 128), all across one."""
_CHECK_SHARPNESS = 3.0
"""Standard deviation of a score. With less, late tokens attend to all keys alike, and their output
and gradients are so small that a wrong one would pass for rounding."""
_CHECK_TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}
_CHECKED = ("output", "gradient of query", "gradient of key", "gradient of value")


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    carry: KeyValueCarry | None,
    where: TokenSlice,
) -> Tensor:
    """Attention [B, H, n, D] of tokens ``[where.start, where.stop)`` over ``[0, where.stop)``.

    ``carry`` may be None if the slice starts at token 0 and no other follows.
    """
    if carry is None and where.start:
        raise RunError(
            f"slice {where.index} starts at token {where.start} and was given no carry;"
            " only a slice that is the whole sequence runs without one"
        )
    whole = where.start == 0 and where.stop == where.total
    output = _SliceAttention.apply(  # type: ignore[no-untyped-call]
        _dense(query), _dense(key), _dense(value), None if whole else carry, where
    )
    return cast(Tensor, output)


class _SliceAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        carry: KeyValueCarry | None,
        where: TokenSlice,
    ) -> Tensor:
        backend = choose(query.device, query.dtype, query.shape[-1])
        own: tuple[Tensor, ...] = (key, value)
        if carry is not None:
            carry.write(where, key, value)
            key, value = carry.read(where.stop)
            own = ()
        attended = backend.forward(Operands(query, key, value, where.start))
        ctx.save_for_backward(query, attended.output, *own, *attended.state)
        ctx.backend, ctx.carry, ctx.where = backend, carry, where
        return attended.output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, output, *rest = ctx.saved_tensors
        carry, where = cast(KeyValueCarry | None, ctx.carry), cast(TokenSlice, ctx.where)
        if carry is None:
            key, value, *rest = rest
        else:
            key, value = carry.read(where.stop)
        gradients = cast(Backend, ctx.backend).backward(
            _dense(grad), Operands(query, key, value, where.start), Attended(output, tuple(rest))
        )
        own = gradients.own
        if carry is not None:
            own = carry.settle(where, *own)
            if gradients.prefix is not None:
                carry.owe(*gradients.prefix)
        return gradients.query, *own, None, None


def _dense(x: Tensor) -> Tensor:
    """The kernels read a head's channels from consecutive places."""
    return x if x.stride(-1) == 1 else x.contiguous()


def self_check(
    device: torch.device, dtype: torch.dtype, *, head_dim: int, heads: int, kv_heads: int
) -> None:
    """Compare the backend in use with plain float64 attention, in slices, forward and backward.

    Operands lie in memory as a layer makes them, the heads of one token side by side. Every slice
    is judged by its own largest value. Takes milliseconds, on a GPU up to a second. Raises
    ``RunError`` that says what differs.
    """
    cuts = _CHECK_CUTS.get(device.type, _CHECK_CUTS["cuda"])
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, h, cuts[-1], head_dim) for h in (heads, kv_heads, kv_heads, heads)]
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    drawn[0] *= _CHECK_SHARPNESS
    drawn = [x.to(dtype) for x in drawn]
    expected = _plain([x.double() for x in drawn])
    found = [x.cpu().double() for x in _sliced([x.to(device) for x in drawn], cuts)]
    for name, want, got in zip(_CHECKED, expected, found, strict=True):
        for right, given in zip(_cut(want, cuts), _cut(got, cuts), strict=True):
            error = float((given - right).abs().max() / right.abs().max())
            allowed = _CHECK_TOLERANCE[dtype]
            if not error <= allowed:
                backend = choose(device, dtype, head_dim).name
                raise RunError(
                    f"attention backend {backend} on {device} in {dtype}: the {name} differs from"
                    f" float64 attention by {error:.1e} of its largest value, {allowed:.0e} is"
                    " allowed; do not train with it, choose another precision, head width or torch"
                    " release"
                )


def _plain(drawn: Sequence[Tensor]) -> list[Tensor]:
    query, key, value = (x.clone().requires_grad_() for x in drawn[:3])
    repeat = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(repeat, 1).mT * query.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    output = weights @ value.repeat_interleave(repeat, 1)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), drawn[3])]


def _sliced(drawn: Sequence[Tensor], cuts: Sequence[int]) -> list[Tensor]:
    kv = drawn[1]
    carry = KeyValueCarry((kv.shape[0], *kv.shape[1:]), device=kv.device, dtype=kv.dtype)
    slices = zip(*(_cut(x, cuts) for x in drawn), strict=True)
    leaves: list[list[Tensor]] = []
    outputs = []
    for index, operands in enumerate(slices):
        where = TokenSlice(index=index, start=cuts[index], stop=cuts[index + 1], total=cuts[-1])
        query, key, value, cotangent = map(_side_by_side, operands)
        leaves.append([x.requires_grad_() for x in (query, key, value)])
        outputs.append((attend(query, key, value, carry, where), cotangent))
    for output, cotangent in reversed(outputs):
        torch.autograd.backward(output, cotangent)
    gradients = [
        torch.cat([cast(Tensor, x.grad) for x in each], 2) for each in zip(*leaves, strict=True)
    ]
    return [torch.cat([output.detach() for output, _ in outputs], 2), *gradients]


def _cut(x: Tensor, cuts: Sequence[int]) -> list[Tensor]:
    """The slices of ``x`` [B, H, N, D]."""
    return [x[:, :, start:stop] for start, stop in pairwise(cuts)]


def _side_by_side(x: Tensor) -> Tensor:
    """``x`` [B, H, n, D] in the memory of [B, n, H, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
