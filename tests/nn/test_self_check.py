"""The self-check at the start: a number that is not finite is a difference too."""

import math

import pytest
import torch

from terashard.errors import RunError
from terashard.nn import attention
from terashard.nn.attention import self_check
from terashard.nn.kernels import MATH, Attended, Backend, Gradients, Operands


def _nan_output(ops: Operands) -> Attended:
    """Right but for one NaN, as a fully masked row would give."""
    right = MATH.forward(ops)
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
