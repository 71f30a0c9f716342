"""The self-check at the start: a number that is not finite is a difference too."""

import math

import pytest
import torch

from terashard.errors import RunError
from terashard.nn import attention
from terashard.nn.attention import self_check
from terashard.nn.kernels import CPU_FLASH, MATH, Attended, Backend, Gradients, Operands


def _nan_output(ops: Operands) -> Attended:
    """Right but for one NaN after the first slice, as a fully masked row would give."""
    right = MATH.forward(ops)
    if ops.start:
        right.output[0, 0, -1, 0] = math.nan
    return right


def _infinite_gradient(grad: torch.Tensor, ops: Operands, attended: Attended) -> Gradients:
    right = MATH.backward(grad, ops, attended)
    right.query[0, 0, 0, 0] = math.inf
    return right


@pytest.mark.parametrize(
    "broken",
    [Backend("b", _nan_output, MATH.backward), Backend("b", MATH.forward, _infinite_gradient)],
    ids=["NaN in the output", "infinite gradient"],
)
def test_a_backend_that_gives_what_is_not_finite_is_refused(
    broken: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "choose", lambda *_: broken)
    with pytest.raises(RunError, match="backend b on cpu"):
        self_check(torch.device("cpu"), torch.float32, head_dim=8, heads=4, kv_heads=2)


def _wrong_beyond_a_tile(ops: Operands) -> Attended:
    """Exact for the first 32 queries; from then on the mask is aligned to the top left."""
    right, shifted = MATH.forward(ops), MATH.forward(ops._replace(start=0))
    right.output[:, :, 32:] = shifted.output[:, :, 32:]
    return right


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_an_error_beyond_a_kernels_first_tile_is_found_in_every_type(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: twelve tokens lay in one tile. Wrong here are the last four of seventy."""
    broken = Backend("b", _wrong_beyond_a_tile, MATH.backward)
    monkeypatch.setattr(attention, "choose", lambda *_: broken)
    with pytest.raises(RunError, match="the output differs"):
        self_check(torch.device("cpu"), dtype, head_dim=16, heads=4, kv_heads=2)


def test_the_backend_is_checked_on_operands_laid_out_as_a_layer_makes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: dense operands hid kernels that are wrong on strided ones."""
    seen: list[Operands] = []

    def forward(ops: Operands) -> Attended:
        seen.append(ops)
        return CPU_FLASH.forward(ops)

    monkeypatch.setattr(attention, "choose", lambda *_: Backend("b", forward, CPU_FLASH.backward))
    self_check(torch.device("cpu"), torch.float32, head_dim=16, heads=4, kv_heads=2)
    assert [ops.query.shape[2] for ops in seen] == [33, 1, 36]
    for ops in seen:
        assert ops.query.transpose(1, 2).is_contiguous()
        assert ops.query.stride()[1:] == (16, 64, 1)


@pytest.mark.parametrize("heads", [(1, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("backend", [MATH, CPU_FLASH], ids=lambda backend: backend.name)
def test_the_longer_cuts_of_a_gpu_raise_no_false_alarm(
    backend: Backend, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "choose", lambda *_: backend)
    monkeypatch.setitem(attention._CHECK_CUTS, "cpu", attention._CHECK_CUTS["cuda"])
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        shape = {"head_dim": 16, "heads": heads[0], "kv_heads": heads[1]}
        self_check(torch.device("cpu"), dtype, **shape)
