"""``fully_shard`` on a CUDA device: several ranks on one GPU over gloo, and one rank on its own.

Not run on the machines of this project's CI, which have no GPU. ``scripts/gpu_check`` runs them.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import terashard
from tests.helpers.processes import run_processes
from tests.shard.engines import Net, gradients, loss_of, same, seeded, whole, words

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def train(model: Any, ranks: list[int]) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    told = []
    for step in range(3):
        optimizer.zero_grad()
        for rank in ranks:
            (loss_of(model, words(rank, step).cuda()) / len(ranks)).backward()
        told.append({n: None if g is None else g.cpu() for n, g in gradients(model).items()})
        optimizer.step()
    return [told, {name: value.cpu() for name, value in whole(model.state_dict()).items()}]


def sharded(size: int, **arguments: Any) -> Any:
    torch.cuda.set_device(0)
    model: Any = seeded(Net()).cuda()
    mesh = DeviceMesh("cuda", list(range(size)))
    for block in model.blocks:
        terashard.fully_shard(block, mesh=mesh, **arguments)
    return terashard.fully_shard(model, mesh=mesh, **arguments)


def over_gloo(rank: int, keep: bool, pool: str) -> list[Any]:
    return train(sharded(2, reshard_after_forward=not keep, pool=pool), [rank])


@pytest.mark.processes
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("pool", ["static", "any", "off"])
def test_two_ranks_on_one_gpu_train_as_one_process(pool: str, keep: bool) -> None:
    expected = train(seeded(Net()).cuda(), [0, 1])
    for found in run_processes(2, over_gloo, keep, pool, timeout=120.0):
        same(found, expected, 1e-9)


def alone(rank: int) -> tuple[list[Any], list[Any], int, int]:
    model = sharded(1, offload_policy=terashard.CPUOffloadPolicy(pin_memory=False))
    offloaded = train(model, [0])
    plain = sharded(1)
    found = train(plain, [0])
    torch.cuda.synchronize()
    first = torch.cuda.memory_allocated()
    loss_of(plain, words(0, 9).cuda()).backward()
    plain.zero_grad()
    torch.cuda.synchronize()
    return offloaded, found, first, torch.cuda.memory_allocated()


@pytest.mark.processes
def test_one_rank_alone_and_offloaded_trains_and_holds_the_same_memory_after_every_step() -> None:
    expected = train(seeded(Net()).cuda(), [0])
    offloaded, found, first, later = run_processes(1, alone, timeout=120.0)[0]
    same(found, expected, 1e-9)
    same(offloaded, expected, 1e-9)
    assert later <= first


def over_nccl(rank: int) -> list[Any]:
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    return train(sharded(1), [0])


@pytest.mark.processes
def test_one_rank_over_nccl_trains() -> None:
    expected = train(seeded(Net()).cuda(), [0])
    same(run_processes(1, over_nccl, timeout=120.0)[0], expected, 1e-9)
