"""Training in float16 on a CUDA device, where one rank's overflow makes all of them skip.

Not run on the machines of this project's CI, which have no GPU. ``scripts/gpu_check`` runs them.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh

import terashard
from tests.helpers.processes import run_processes
from tests.shard.engines import Net, loss_of, same, seeded, whole, words

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICE = "cuda"
FLOAT16 = terashard.MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)


def sharded(size: int, **arguments: Any) -> Any:
    model: Any = seeded(Net()).float().to(DEVICE)
    return terashard.fully_shard(model, mesh=DeviceMesh(DEVICE, list(range(size))), **arguments)


def trained(
    model: Any, scaler: GradScaler, ranks: list[int], bad: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Four steps of a fused optimizer; in step 1 rank ``bad`` finds an infinity."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        for rank in ranks:
            loss = loss_of(model, words(rank, step).to(DEVICE)).float() / len(ranks)
            scaler.scale(loss * (float("inf") if (rank, step) == (bad, 1) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, {name: value.cpu() for name, value in whole(model.state_dict()).items()}


def over_gloo(rank: int, bad: int) -> Any:
    scaler = terashard.ShardedGradScaler(DEVICE, init_scale=64.0)
    return trained(sharded(2), scaler, [rank], bad)


@pytest.mark.processes
@pytest.mark.parametrize("bad", [0, 1])
def test_two_ranks_on_one_gpu_skip_together(bad: int) -> None:
    plain = seeded(Net()).float().to(DEVICE)
    expected = trained(plain, GradScaler(DEVICE, init_scale=64.0), [0, 1], bad)
    assert expected[0] == [64.0, 32.0, 32.0, 32.0]
    for found in run_processes(2, over_gloo, bad, timeout=120.0):
        same(found, expected, 1e-4)


def alone(rank: int) -> list[float]:
    """Scales when the first one overflows in float16, and every other does not."""
    scaler = terashard.ShardedGradScaler(DEVICE, init_scale=2.0**20, backoff_factor=2.0**-12)
    return trained(sharded(1, mp_policy=FLOAT16), scaler, [0], bad=-1)[0]


@pytest.mark.processes
def test_an_overflow_in_float16_is_skipped() -> None:
    assert run_processes(1, alone, timeout=120.0) == [[256.0] * 4]
