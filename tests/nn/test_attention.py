"""Attention in slices: backends against plain float64 attention, what is kept and refused."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from terashard.errors import RunError
from terashard.nn import attention
from terashard.nn.attention import attend, self_check
from terashard.nn.carry import KeyValueCarry
from terashard.nn.kernels import (
    CPU_FLASH,
    CUDA_EFFICIENT,
    CUDA_FLASH,
    MATH,
    Attended,
    Backend,
    Gradients,
    Operands,
    choose,
)
from terashard.nn.protocols import TokenSlice
from tests.nn.witness import slices_of

CPU = torch.device("cpu")
LENGTH = 11


def operands(kv_heads: int, dtype: torch.dtype = torch.float64, head_dim: int = 8) -> list[Tensor]:
    """Query, key, value of 4 heads, and a cotangent of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, LENGTH, head_dim) for heads in (4, kv_heads, kv_heads, 4)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value


def new_carry(key: Tensor) -> KeyValueCarry:
    batch, heads, length, width = key.shape
    return KeyValueCarry((batch, heads, length, width), device=key.device, dtype=key.dtype)


def in_slices(drawn: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    """Output, and gradients of query, key and value."""
    leaves = [x.clone().requires_grad_() for x in drawn[:3]]
    carry, outputs = new_carry(drawn[1]), []
    for where in slices_of(lengths):
        query, key, value = (x[:, :, where.start : where.stop] for x in leaves)
        outputs.append(attend(query, key, value, carry, where))
    for output, cotangent in reversed(
        list(zip(outputs, drawn[3].split(list(lengths), 2), strict=True))
    ):
        output.backward(cotangent)
    return [torch.cat(outputs, 2).detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("backend", [CPU_FLASH, MATH], ids=lambda b: b.name)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths", [[11], [4, 7], [9, 1, 1], [1] * 11], ids=str)
def test_slices_match_plain_attention(
    backend: Backend, kv_heads: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "choose", lambda *_: backend)
    drawn = operands(kv_heads)
    leaves = [x.clone().requires_grad_() for x in drawn[:3]]
    output = plain(*leaves)
    expected = [output.detach(), *torch.autograd.grad(output, leaves, drawn[3])]
    for got, want in zip(in_slices(drawn, lengths), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_whole_sequence_needs_no_carry_and_leaves_a_given_one_empty(kv_heads: int) -> None:
    query, key, value, _ = operands(kv_heads)
    (where,) = slices_of([LENGTH])
    carry = new_carry(key)
    for given in (None, carry):
        got = attend(query, key, value, given, where)
        torch.testing.assert_close(got, plain(query, key, value), rtol=1e-13, atol=1e-13)
    with pytest.raises(RunError, match="slice 0 ran backward"):
        carry.read(LENGTH)


@pytest.mark.parametrize("which", range(4), ids=["query", "key", "value", "cotangent"])
@pytest.mark.parametrize("lengths", [[11], [4, 7]], ids=str)
def test_channels_apart_in_memory_are_read_right(which: int, lengths: list[int]) -> None:
    drawn = operands(2)
    expected = in_slices(drawn, lengths)
    drawn[which] = drawn[which].mT.contiguous().mT
    for got, want in zip(in_slices(drawn, lengths), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("backend", [CUDA_FLASH, CUDA_EFFICIENT], ids=lambda b: b.name)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_cuda_operators_take_and_give_these_shapes(backend: Backend, kv_heads: int) -> None:
    """Only on meta: arguments and shapes, no values."""
    query, key, value, cotangent = (x.to("meta") for x in operands(kv_heads, torch.bfloat16))
    ops = Operands(query[:, :, 4:], key, value, 4)
    attended = backend.forward(ops)
    assert attended.output.shape == ops.query.shape
    gradients = backend.backward(cotangent[:, :, 4:], ops, attended)
    assert gradients.query.shape == ops.query.shape
    assert gradients.prefix is not None
    assert all(x.shape == (2, kv_heads, 4, 8) for x in gradients.prefix)
    assert all(x.shape == (2, kv_heads, 7, 8) for x in gradients.own)


def test_autograd_keeps_neither_keys_nor_values_of_a_slice() -> None:
    query, key, value, _ = (x.requires_grad_() for x in operands(1))
    kept: list[Tensor] = []
    carry = new_carry(key)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        for where in slices_of([6, 5]):
            parts = (x[:, :, where.start : where.stop] for x in (query, key, value))
            attend(*parts, carry, where)
    assert sorted(tuple(x.shape[1:]) for x in kept) == sorted(
        [(4, 6, 8), (4, 6, 8), (4, 6), (4, 5, 8), (4, 5, 8), (4, 5)]
    )


def test_many_bfloat16_slices_are_as_exact_as_one() -> None:
    drawn = operands(2, torch.bfloat16)
    leaves = [x.double().requires_grad_() for x in drawn[:3]]
    expected = torch.autograd.grad(plain(*leaves), leaves, drawn[3].double())
    errors = []
    for lengths in ([LENGTH], [1] * LENGTH):
        found = in_slices(drawn, lengths)[1:]
        pairs = zip(found, expected, strict=True)
        errors.append(max(float((g.double() - w).abs().max() / w.abs().max()) for g, w in pairs))
    assert errors[1] < 2 * errors[0] < 0.05


def test_a_later_slice_without_a_carry_is_refused() -> None:
    query, key, value, _ = operands(4)
    with pytest.raises(RunError, match="was given no carry"):
        attend(query, key, value, None, TokenSlice(index=1, start=3, stop=11, total=11))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(16, 2), (7, 4), (64, 1)])
def test_the_self_check_passes_here(dtype: torch.dtype, head_dim: int, kv_heads: int) -> None:
    self_check(CPU, dtype, head_dim=head_dim, heads=4, kv_heads=kv_heads)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(16, 2), (7, 4), (64, 1), (128, 4)])
def test_the_self_check_passes_on_cuda(dtype: torch.dtype, head_dim: int, kv_heads: int) -> None:
    self_check(torch.device("cuda", 0), dtype, head_dim=head_dim, heads=4, kv_heads=kv_heads)


def _shorter_prefix(grad: Tensor, ops: Operands, attended: Attended) -> Gradients:
    right = MATH.backward(grad, ops, attended)
    if right.prefix is None:
        return right
    return right._replace(prefix=(right.prefix[0] * 0, right.prefix[1]))


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (
            Backend("b", lambda o: CPU_FLASH.forward(o._replace(start=0)), CPU_FLASH.backward),
            "output",
        ),
        (Backend("b", MATH.forward, _shorter_prefix), "gradient of key"),
    ],
    ids=["mask aligned to the top left", "prefix gradient dropped"],
)
def test_the_self_check_refuses_a_wrong_backend(
    broken: Backend, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "choose", lambda *_: broken)
    with pytest.raises(RunError, match=f"backend b on cpu in torch.float32: the {what} differs"):
        self_check(CPU, torch.float32, head_dim=8, heads=4, kv_heads=2)


def test_backends_are_chosen_by_device_type_and_head_width() -> None:
    cuda = torch.device("cuda")
    assert choose(CPU, torch.bfloat16, 7).name == "cpu_flash"
    assert choose(cuda, torch.bfloat16, 64).name == "cuda_flash"
    assert choose(cuda, torch.bfloat16, 20).name == "math"
    assert choose(cuda, torch.float32, 64).name == "cuda_efficient"
    assert choose(cuda, torch.float64, 64).name == "math"
