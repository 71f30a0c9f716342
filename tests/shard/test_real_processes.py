"""What only real processes show: gloo's own messages, torch's checkpoints, bytes on the wire."""

import os
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import terashard
from tests.helpers.processes import run_processes
from tests.shard.engines import (
    Net,
    gradients,
    loss_of,
    mean_gradients,
    mesh_of,
    same,
    seeded,
    whole,
    words,
)
from tests.shard.test_ways_of_running import Branching, branching

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped"),
]


def sharded(engine: Any, shape: tuple[int, ...], build: Any = Net, **arguments: Any) -> Any:
    model: Any = seeded(build())
    mesh = mesh_of(*shape)
    for block in model.blocks:
        engine.fully_shard(block, mesh=mesh, **arguments)
    engine.fully_shard(model, mesh=mesh, **arguments)
    return model


def train(model: Any, ranks: list[int]) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    told = []
    for step in range(3):
        optimizer.zero_grad()
        for rank in ranks:
            (loss_of(model, words(rank, step)) / len(ranks)).backward()
        told.append(gradients(model))
        optimizer.step()
    return [told, whole(model.state_dict())]


def trained(rank: int, shape: tuple[int, ...], keep: bool) -> list[Any]:
    return train(sharded(terashard, shape, reshard_after_forward=not keep), [rank])


@pytest.mark.parametrize(("shape", "keep"), [((2,), False), ((2,), True), ((2, 2), False)])
def test_training_over_gloo_is_that_of_one_process(shape: tuple[int, ...], keep: bool) -> None:
    size = torch.Size(shape).numel()
    expected = train(seeded(Net()), list(range(size)))
    for found in run_processes(size, trained, shape, keep):
        same(found, expected)


def skipping(rank: int) -> list[Any]:
    model = sharded(terashard, (2,), Branching)
    told = []
    for step in range(4):
        model.zero_grad()
        branching(model, words(rank, step), rank == 0 or step == 1).backward()
        told.append(gradients(model))
    return told


def test_a_unit_that_one_rank_skips_does_not_hang_over_gloo() -> None:
    plain = seeded(Branching())
    expected = [
        mean_gradients(
            plain,
            [
                lambda m, s=step: branching(m, words(0, s), True),
                lambda m, s=step: branching(m, words(1, s), s == 1),
            ],
        )
        for step in range(4)
    ]
    for found in run_processes(2, skipping):
        same(found, expected)


def deep_skipping(rank: int) -> bool:
    """Rank 1 skips a unit near the end of a deep model, so its sums fall behind by many."""
    model: Any = seeded(DeepBranching())
    mesh = mesh_of(2)
    for block in model.blocks:
        terashard.fully_shard(block, mesh=mesh)
    terashard.fully_shard(model, mesh=mesh)
    for step in range(3):
        branching(model, words(rank, step), rank == 0).backward()
    return True


class DeepBranching(Branching):
    """Ten blocks; the second is the one that may be skipped."""

    def __init__(self) -> None:
        super().__init__()
        block = self.blocks[0]
        self.blocks = nn.ModuleList(deepcopy(block) for _ in range(10))


def test_a_rank_that_skips_a_unit_of_a_deep_model_keeps_up_with_the_sums() -> None:
    assert run_processes(2, deep_skipping, timeout=30.0) == [True, True]


def saved(rank: int, folder: str, by: str) -> Any:
    """A state of one engine, saved by torch's checkpoint."""
    engine = fsdp if by == "torch" else terashard
    model = sharded(engine, (2,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_of(model, words(rank, 0)).backward()
    optimizer.step()
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=folder)
    return whole(model.state_dict())


def loaded(rank: int, folder: str, by: str) -> Any:
    """The values of a checkpoint in the other engine, and what one more step makes of them."""
    engine = fsdp if by == "torch" else terashard
    model = sharded(engine, (2,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_of(model, words(rank, 5)).backward()
    optimizer.step()
    optimizer.zero_grad()
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    before = whole(model.state_dict())
    loss_of(model, words(rank, 1)).backward()
    optimizer.step()
    return before, whole(model.state_dict())


@pytest.mark.parametrize("writer", ["torch", "ours"])
def test_torchs_checkpoints_go_from_engine_to_engine(tmp_path: Path, writer: str) -> None:
    values = run_processes(2, saved, str(tmp_path), writer)[0]
    reader = "ours" if writer == "torch" else "torch"
    found = run_processes(2, loaded, str(tmp_path), reader)[0]
    again = run_processes(2, loaded, str(tmp_path), writer)[0]
    same(found[0], values)
    same(found[1], again[1])


def counted(rank: int) -> tuple[int, int]:
    """Bytes that our counters name, and bytes that gloo was handed to send, in one step."""
    model = sharded(terashard, (2,))
    loss_of(model, words(rank, 0)).backward()
    model.zero_grad()
    sent = 0
    plain = dist.isend

    def counting(tensor: Any, **rest: Any) -> Any:
        nonlocal sent
        sent += tensor.nbytes
        return plain(tensor, **rest)

    units = model._own.root.units
    before = sum(u.traffic.gathered_bytes + u.traffic.reduced_bytes for u in units)
    dist.isend = counting
    try:
        loss_of(model, words(rank, 1)).backward()
    finally:
        dist.isend = plain
    after = sum(u.traffic.gathered_bytes + u.traffic.reduced_bytes for u in units)
    return after - before, sent


def test_the_bytes_that_are_counted_are_those_that_are_sent() -> None:
    """Of a tensor handed to two ranks each sends one half, up to a row where it is uneven."""
    found = run_processes(2, counted)
    told, sent = (sum(column) for column in zip(*found, strict=True))
    assert sent == told / 2 > 0


def extra_batch(rank: int) -> None:
    os.environ["TERASHARD_DEBUG"] = "1"
    model = sharded(terashard, (2,))
    for step in range(3 if rank == 0 else 2):
        loss_of(model, words(rank, step)).backward()
    if rank:
        time.sleep(20)


def test_a_rank_with_one_more_batch_is_named_within_ten_seconds_in_debug_mode() -> None:
    began = time.monotonic()
    with pytest.raises(terashard.TerashardError, match=r"rank 1: said nothing"):
        run_processes(2, extra_batch, timeout=30.0)
    assert time.monotonic() - began < 14.0


def pools(rank: int, pool: str) -> Any:
    model = sharded(terashard, (2,), pool=pool)
    return train(model, [rank])


@pytest.mark.parametrize("pool", ["any", "off"])
def test_every_pool_trains_over_gloo(pool: str) -> None:
    expected = train(seeded(Net()), [0, 1])
    for found in run_processes(2, pools, pool):
        same(found, expected)
