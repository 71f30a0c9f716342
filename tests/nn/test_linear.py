"""A Linear that puts aside: outputs and gradients of ``nn.Linear``, the weight's once for all."""

import pytest
import torch
from torch import Tensor, nn

from terashard.nn.linear import Stash, StashingLinear, stash_linears


def slices(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, n, 5, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for n in (3, 1, 4)
    ]


@pytest.mark.parametrize("bias", [True, False])
def test_all_gradients_are_those_of_a_linear(bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(5, 7, bias=bias, dtype=torch.float64)
    other = nn.Linear(5, 7, bias=bias, dtype=torch.float64)
    other.load_state_dict(plain.state_dict())
    stashes = stash_linears([nn.Sequential(other)])
    inputs = [slices(torch.float64), slices(torch.float64)]
    for linear, parts in zip((plain, other), inputs, strict=True):
        for x in reversed(parts):
            linear(x).square().sum().backward()
    assert other.weight.grad is None
    product = stashes[other].take(torch.float64)
    assert product is not None
    torch.testing.assert_close(product, plain.weight.grad, rtol=1e-12, atol=1e-12)
    if bias:
        torch.testing.assert_close(other.bias.grad, plain.bias.grad, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(*inputs, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    assert stashes[other].take(torch.float64) is None, "taken once"


def test_narrow_slices_are_multiplied_in_the_wider_format() -> None:
    """Not rounded slice by slice, as ordinary gradients are."""
    stash, exact = Stash(), torch.zeros(5, 5, dtype=torch.float64)
    for x in slices(torch.bfloat16):
        stash.add(x.detach(), x.detach())
        rows = x.detach().double().reshape(-1, 5)
        exact += rows.T @ rows
    product = stash.take(torch.float32)
    assert product is not None
    assert product.dtype == torch.float32
    torch.testing.assert_close(product.double(), exact, rtol=1e-6, atol=1e-6)


def test_nothing_is_put_aside_without_gradients_or_for_a_frozen_weight() -> None:
    linear = nn.Linear(5, 7)
    (stash,) = stash_linears([linear]).values()
    with torch.no_grad():
        linear(slices(torch.float32)[0])
    linear.weight.requires_grad_(False)
    linear(slices(torch.float32)[0]).sum().backward()
    assert stash.take(torch.float32) is None


def test_only_exact_linears_with_a_weight_of_their_own_put_aside() -> None:
    class Special(nn.Linear):
        pass

    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    own = nn.Linear(4, 4)
    found = stash_linears([nn.Sequential(one, two, Special(4, 4)), nn.Sequential(own, own)])
    assert list(found) == [own]
    assert type(own) is StashingLinear
    assert [type(one), type(two)] == [nn.Linear, nn.Linear]
