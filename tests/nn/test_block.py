"""The operators of a layer: hand-written backwards, positions, float32 inside bfloat16."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from terashard.errors import DataError
from terashard.nn.block import Block, new_norm
from terashard.nn.carry import KeyValueCarry
from terashard.nn.embedding import TokenEmbedding
from terashard.nn.mlp import _SiluProduct
from terashard.nn.norm import RMSNorm
from terashard.nn.protocols import TokenSlice
from terashard.nn.rope import rotate
from tests.nn.witness import GPT2, LLAMA, slices_of


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_rms_norm_matches_torch() -> None:
    norm = RMSNorm(6, 1e-5).double()
    weight = draw(6).requires_grad_()
    norm.weight = torch.nn.Parameter(weight.detach().clone())
    x, cotangent = draw(3, 4, 6).requires_grad_(), draw(3, 4, 6).roll(1)
    expected = F.rms_norm(x, (6,), weight, 1e-5)
    torch.testing.assert_close(norm(x), expected, rtol=1e-14, atol=1e-14)
    wanted = torch.autograd.grad(expected, (x, weight), cotangent)
    found = torch.autograd.grad(norm(x), (x, norm.weight), cotangent)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


def test_rms_norm_computes_in_float32_under_bfloat16() -> None:
    norm = RMSNorm(512, 1e-5).to(torch.bfloat16)
    x = draw(2, 64, 512).to(torch.bfloat16)
    x = (x * 100).requires_grad_()
    y = norm(x)
    exact = F.rms_norm(x.detach().double(), (512,), None, 1e-5)
    assert float(((y.detach().double() - exact) / exact).abs().max()) < 2**-8  # one rounding
    y.float().square().sum().backward()
    assert x.grad.dtype == norm.weight.grad.dtype == torch.bfloat16
    # float32 sums over 128 rows, rounded once: bfloat16 sums would be off by percents
    total = 2 * exact.square().sum((0, 1))
    assert float(((norm.weight.grad.double() - total) / total).abs().max()) < 0.01


def test_layer_norm_computes_in_float32_under_bfloat16() -> None:
    norm = new_norm(replace(GPT2, hidden_size=512), None).to(torch.bfloat16)
    x = (draw(2, 64, 512) + 100).to(torch.bfloat16)
    exact = F.layer_norm(x.double(), (512,))
    error = (norm(x).detach().double() - exact).abs()
    assert bool((error <= exact.abs() * 2**-8 + 1e-3).all())


def test_gated_product_has_the_gradient_of_its_formula() -> None:
    gate, up = draw(5, 7).requires_grad_(), draw(5, 7).flip(0).requires_grad_()
    assert torch.autograd.gradcheck(_SiluProduct.apply, (gate, up))
    torch.testing.assert_close(_SiluProduct.apply(gate, up), F.silu(gate) * up)


def test_rotary_positions_turn_pairs_and_have_the_transposed_gradient() -> None:
    where = TokenSlice(index=1, start=3, stop=7, total=9)
    x = draw(2, 4, 3, 6).requires_grad_()
    y = rotate(x, where, 10_000.0)
    pairs = torch.complex(x[..., :3], x[..., 3:])
    angle = torch.arange(3, 7)[:, None] * 10_000.0 ** (-torch.arange(3) / 3)
    turned = pairs * torch.exp(1j * angle.double()).unsqueeze(1)
    torch.testing.assert_close(y, torch.cat([turned.real, turned.imag], -1), rtol=1e-6, atol=1e-6)
    assert torch.autograd.gradcheck(lambda t: rotate(t, where, 10_000.0), (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_positions_do_not_depend_on_where_a_slice_begins(dtype: torch.dtype) -> None:
    x = draw(1, 37, 2, 10).to(dtype)
    whole = rotate(x, slices_of([37])[0], 500.0)
    parts = [rotate(x[:, w.start : w.stop], w, 500.0) for w in slices_of([5, 1, 31])]
    assert torch.equal(torch.cat(parts, 1), whole)


def test_a_table_first_made_in_inference_serves_training_too() -> None:
    where = slices_of([6])[0]
    with torch.inference_mode():
        rotate(torch.ones(1, 6, 1, 4), where, 123.0)
    x = torch.ones(1, 6, 1, 4, requires_grad=True)
    rotate(x, where, 123.0).sum().backward()
    assert x.grad is not None


def test_a_block_makes_a_carry_of_its_own_heads() -> None:
    block = Block(LLAMA, "meta")
    carry = block.new_carry(3, 9, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert isinstance(carry, KeyValueCarry)
    rows = torch.zeros(3, LLAMA.num_kv_heads, 9, LLAMA.head_dim)
    carry.write(slices_of([9])[0], rows, rows)
    key, _ = carry.read(9)
    assert key.shape == rows.shape
    assert key.dtype == torch.bfloat16
    embed = TokenEmbedding(LLAMA, "meta")
    assert embed.new_carry(3, 9, device=torch.device("cpu"), dtype=torch.float32) is None


@pytest.mark.parametrize("wrong", [29, -1])
def test_a_token_outside_the_vocabulary_is_refused(wrong: int) -> None:
    embed = TokenEmbedding(LLAMA)
    with pytest.raises(DataError, match=f"token id {wrong} is outside the vocabulary of 29 tokens"):
        embed(torch.tensor([[0, wrong]]), None, slices_of([2])[0])


def test_a_sequence_longer_than_learned_positions_is_refused_at_its_first_slice() -> None:
    embed = TokenEmbedding(GPT2)
    with pytest.raises(DataError, match="a sequence has 17 tokens, but the model knows 16"):
        embed(torch.zeros(1, 4, dtype=torch.long), None, slices_of([4, 13])[0])
