"""What slices leave for each other: order, memory, and the gradient that comes back."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from terashard.errors import RunError
from terashard.nn.carry import KeyValueCarry, StateCarry
from terashard.nn.protocols import Carry, TokenSlice
from tests.nn.witness import slices_of

FIRST, SECOND, THIRD = slices_of([2, 3, 1])


def rows(where: TokenSlice, value: float = 1.0) -> Tensor:
    return torch.full((1, 2, where.stop - where.start, 4), value, dtype=torch.bfloat16)


def new_carry() -> KeyValueCarry:
    return KeyValueCarry((1, 2, 6, 4), device=torch.device("cpu"), dtype=torch.bfloat16)


def test_carries_implement_the_protocol() -> None:
    assert isinstance(new_carry(), Carry)
    assert isinstance(StateCarry(), Carry)


def test_rows_are_written_in_place_and_read_as_views() -> None:
    carry = new_carry()
    carry.write(FIRST, rows(FIRST), rows(FIRST, 2))
    early, _ = carry.read(2)
    carry.write(SECOND, rows(SECOND, 3), rows(SECOND, 4))
    key, value = carry.read(5)
    assert early.data_ptr() == key.data_ptr()
    assert key[0, 0, :, 0].tolist() == [1, 1, 3, 3, 3]
    assert value[0, 0, :, 0].tolist() == [2, 2, 4, 4, 4]


@pytest.mark.parametrize("order", [[SECOND], [FIRST, FIRST], [FIRST, THIRD]])
def test_slices_out_of_order_are_refused(order: list[TokenSlice]) -> None:
    carry = new_carry()
    *before, wrong = order
    for where in before:
        carry.write(where, rows(where), rows(where))
    with pytest.raises(RunError, match="its slices run in order, each once"):
        carry.write(wrong, rows(wrong), rows(wrong))


def test_a_slice_that_never_ran_cannot_be_recomputed() -> None:
    again = TokenSlice(index=0, start=0, stop=2, total=6, recompute=True)
    with pytest.raises(RunError, match=r"0 tokens .* not put attention under torch\.utils\.check"):
        new_carry().write(again, rows(again), rows(again))


def test_what_later_slices_owe_is_summed_in_float32() -> None:
    carry = new_carry()
    carry.owe(*(torch.full((1, 2, 5, 4), 256.0, dtype=torch.bfloat16) for _ in "kv"))
    for _ in range(4):
        carry.owe(*(torch.full((1, 2, 2, 4), 1.0, dtype=torch.bfloat16) for _ in "kv"))
    key, value = carry.settle(FIRST, rows(FIRST, 0), rows(FIRST, 0))
    assert key.dtype == torch.bfloat16
    assert (
        float(key[0, 0, 0, 0]) == float(value[0, 1, 1, 3]) == 260.0
    )  # bfloat16 alone stays at 256


def test_sums_go_with_slice_0_and_rows_when_it_is_forgotten() -> None:
    carry = new_carry()
    carry.write(FIRST, rows(FIRST), rows(FIRST))
    carry.owe(rows(FIRST), rows(FIRST))
    assert float(carry.settle(FIRST, rows(FIRST), rows(FIRST))[0].max()) == 2.0
    assert float(carry.settle(FIRST, rows(FIRST), rows(FIRST))[0].max()) == 1.0
    carry.forget(1)
    carry.read(2)
    carry.forget(0)
    with pytest.raises(RunError, match="run the slices forward again"):
        carry.read(2)


class Recurrent(nn.Module):
    """A gated unit over time: a layer of someone's own."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor, carry: StateCarry | None, where: TokenSlice) -> Tensor:
        state = carry.take(where) if carry else None
        state = torch.zeros_like(x[:, 0]) if state is None else state
        outputs = []
        for token in x.unbind(1):
            state = self.cell(token, state)
            outputs.append(state)
        if carry:
            carry.put(where, state)
        return torch.stack(outputs, 1)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("lengths", [[6], [2, 4], [1] * 6], ids=str)
def test_a_recurrent_layer_in_slices_matches_the_uncut_run(
    lengths: list[int], recompute: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    unit = Recurrent()
    with torch.no_grad():
        for parameter in unit.parameters():
            parameter.normal_(generator=generator)
    x, cotangent = torch.randn(2, 2, 6, 3, generator=generator, dtype=torch.float64).unbind()
    x.requires_grad_()
    parameters = [x, *unit.parameters()]
    whole = unit(x, None, slices_of([6])[0])
    expected = torch.autograd.grad(whole, parameters, cotangent)
    carry, outputs = StateCarry(), []
    with torch.set_grad_enabled(not recompute):
        for where in slices_of(lengths):
            outputs.append(unit(x[:, where.start : where.stop], carry, where))
    for where in reversed(slices_of(lengths)):
        output = outputs[where.index]
        if recompute:
            output = unit(x[:, where.start : where.stop], carry, where)
        roots = [(output, cotangent[:, where.start : where.stop]), *carry.roots(where.index)]
        torch.autograd.backward(*zip(*roots, strict=True))
        carry.forget(where.index)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-14, atol=1e-14)
    for parameter, want in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, want, rtol=1e-12, atol=1e-12)


def test_taking_what_was_not_put_is_refused() -> None:
    carry = StateCarry()
    carry.put(FIRST, torch.zeros(1), "mean")
    with pytest.raises(RunError, match="slice 1 takes 'state', which slice 0 did not put"):
        carry.take(SECOND)
    assert carry.take(FIRST) is None


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_a_state_taken_twice_is_owed_both_gradients(recompute: bool) -> None:
    """Regression: the second take put a new leaf in the first one's place: 5 came back, not 8."""
    carry, state = StateCarry(), torch.ones(1, dtype=torch.float64)
    carry.put(FIRST, state)
    with torch.set_grad_enabled(not recompute):
        carry.take(SECOND)
    again = TokenSlice(index=1, start=SECOND.start, stop=SECOND.stop, total=6, recompute=recompute)
    one, other = carry.take(again), carry.take(again)
    assert one is not None
    assert other is not None
    (3 * one + 5 * other).sum().backward()
    ((root, gradient),) = carry.roots(0)
    assert root is state
    assert float(gradient) == 8.0


def recomputed_in_slices(lengths: list[int], *, use_reentrant: bool) -> list[Tensor]:
    """Gradients of input and parameters when ``checkpoint`` runs every slice twice."""
    generator = torch.Generator().manual_seed(1)
    unit, carry = Recurrent(), StateCarry()
    for parameter in unit.parameters():
        parameter.data.normal_(generator=generator)
    x, cotangent = torch.randn(2, 2, 8, 3, generator=generator, dtype=torch.float64).unbind()
    leaves = [part.clone().requires_grad_() for part in x.split(lengths, 1)]
    where = slices_of(lengths)
    outputs = [
        checkpoint(unit, leaf, carry, here, use_reentrant=use_reentrant)
        for leaf, here in zip(leaves, where, strict=True)
    ]
    for here in reversed(where):
        roots = [(outputs[here.index], cotangent[:, here.start : here.stop])]
        torch.autograd.backward(*zip(*roots, *carry.roots(here.index), strict=True))
        carry.forget(here.index)
    gradients = [torch.cat([leaf.grad for leaf in leaves], 1)]
    return gradients + [parameter.grad for parameter in unit.parameters()]


def test_a_recurrent_layer_under_checkpoint_matches_the_uncut_run() -> None:
    """Regression: the recomputation took a new leaf, and gradients were off without an error."""
    whole = recomputed_in_slices([8], use_reentrant=False)
    cut = recomputed_in_slices([3, 2, 3], use_reentrant=False)
    for want, found in zip(whole, cut, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


def test_a_state_put_under_reentrant_checkpoint_is_refused() -> None:
    recomputed_in_slices([8], use_reentrant=True)
    with pytest.raises(RunError, match=r"slice 1 put 'state' while .* use_reentrant=False"):
        recomputed_in_slices([3, 2, 3], use_reentrant=True)


def test_a_state_that_was_put_detached_is_owed_nothing() -> None:
    carry = StateCarry()
    carry.put(FIRST, torch.ones(1))
    state = carry.take(SECOND)
    assert state is not None
    (3 * state).sum().backward()
    ((root, _),) = carry.roots(0)
    assert not root.requires_grad


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_a_state_without_gradients_crosses_the_cut(dtype: torch.dtype) -> None:
    """Regression: a counter was refused by ``requires_grad_``."""
    carry = StateCarry()
    carry.put(FIRST, torch.ones(2, dtype=dtype))
    state = carry.take(SECOND)
    assert state is not None
    assert state.dtype == dtype
    assert list(carry.roots(0)) == []
