"""Gradients of a few rows on a CUDA device, exchanged by two ranks of one GPU through the host.

Not run on the machines of this project's CI, which have no GPU. ``scripts/gpu_check`` runs them.
"""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import terashard
from tests.helpers.processes import run_processes
from tests.shard.engines import same, whole
from tests.shard.test_lazy_optimizers import Tables, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICE = "cuda"


def trained(model: Any, kind: Any, ranks: list[int]) -> dict[str, torch.Tensor]:
    optimizer = make(kind, model)
    for step in range(3):
        optimizer.zero_grad()
        for rank in ranks:
            generator = torch.Generator().manual_seed(10 * step + rank)
            rows = torch.randint(0, 8, (4,), generator=generator).to(DEVICE)
            (model(rows, both=rank == 0) / len(ranks)).backward()
        optimizer.step()
    return {name: value.cpu() for name, value in whole(model.state_dict()).items()}


def over_gloo(rank: int, kind: Any) -> tuple[dict[str, torch.Tensor], int]:
    model: Any = Tables().to(DEVICE)
    terashard.fully_shard(model, mesh=DeviceMesh(DEVICE, [0, 1]))
    found = trained(model, kind, [rank])
    rows = terashard.touched_rows(model.words.weight)
    assert rows is not None
    assert rows.device.type == DEVICE
    return found, len(rows)


@pytest.mark.processes
@pytest.mark.parametrize("kind", [terashard.SparseAdam, terashard.RowwiseAdagrad])
def test_two_ranks_on_one_gpu_step_on_touched_rows_as_one_process(kind: Any) -> None:
    expected = trained(Tables().to(DEVICE), kind, [0, 1])
    found = run_processes(2, over_gloo, kind, timeout=120.0)
    for values, _ in found:
        same(values, expected)
    assert 0 < sum(count for _, count in found) < 11
