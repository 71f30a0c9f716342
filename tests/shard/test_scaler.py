"""One verdict on gradients in float16: torch's own in one process, the same on all ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor

import terashard
from terashard import ShardedGradScaler
from tests.helpers.processes import run_processes
from tests.helpers.torch_threads import run_ranks
from tests.shard.engines import Block, Here, Net, loss_of, mesh_of, run, same, seeded, whole, words

SETTINGS: dict[str, Any] = {"init_scale": 8.0, "growth_interval": 2}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),  # unscales by itself in torch
}
CLIP = 0.5


def net() -> nn.Module:
    return seeded(Net())


def sharded(model: Any, *shape: int) -> Any:
    terashard.shard_where(model, terashard.of_class(Block), mesh=mesh_of(*shape))
    return model


def steps(
    model: Any, optimizer: Any, scaler: GradScaler, ranks: list[int], *, bad: int | None, clip: bool
) -> tuple[list[float], list[float]]:
    """Five steps; in step 2 rank ``bad`` finds an infinity. Scales, and norms where finite.

    Without ``clip`` the optimizer gets gradients that were not unscaled before.
    """
    scales, norms = [], []
    for step in range(5):
        optimizer.zero_grad()
        for rank in ranks:
            loss = loss_of(model, words(rank, step)) / len(ranks)
            scaler.scale(loss).backward()
        if step == 2 and bad in ranks:
            _local(model.blocks[1].up.weight.grad)[0, 0] = float("inf")
        if clip:
            scaler.unscale_(optimizer)
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            if step != 2:
                norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, norms


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("bad", [None, 0, 3])
def test_steps_scales_and_norms_are_those_of_torch_in_one_process(
    name: str, clip: bool, bad: int | None
) -> None:
    """Over 4 ranks; a step is skipped by all, whoever found the infinity, and the scale grows."""
    model = net()
    plain = GradScaler("cpu", **SETTINGS)
    optimizer = OPTIMIZERS[name](model.parameters())
    expected = steps(model, optimizer, plain, [0, 1, 2, 3], bad=bad, clip=clip)
    assert expected[0] == [8.0, 16.0, *([16.0, 32.0, 32.0] if bad is None else [8.0, 8.0, 16.0])]

    def program(here: Here) -> Any:
        sharded(here.model, 2, 2) if bad == 3 else sharded(here.model, 4)
        optimizer = OPTIMIZERS[name](here.model.parameters())
        scaler = ShardedGradScaler("cpu", **SETTINGS)
        told = steps(here.model, optimizer, scaler, [here.rank], bad=bad, clip=clip)
        return told, whole(here.model.state_dict())

    for found in run("ours", program, 4, net):
        same(found, (expected, dict(model.state_dict())), 1e-6)


def one_step(here: Here, name: str, bad: int, value: float) -> tuple[float, bool]:
    """A step without ``unscale_``; the scale, and whether anything moved."""
    model: Any = sharded(here.model, 2)
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = ShardedGradScaler("cpu", **SETTINGS)
    before = whole(model.state_dict())
    scaler.scale(loss_of(model, words(here.rank, 0))).backward()
    if here.rank == bad:
        _local(model.head.bias.grad)[0] = value
    scaler.step(optimizer)
    scaler.update()
    after = whole(model.state_dict())
    return scaler.get_scale(), any(not torch.equal(after[n], before[n]) for n in before)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("bad", [0, 1])
def test_all_ranks_skip_what_one_found_without_being_asked_first(
    name: str, value: float, bad: int
) -> None:
    found = run("ours", lambda here: one_step(here, name, bad, value), 2, net)
    assert found == [(4.0, False)] * 2


def test_ranks_without_rows_take_part() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 2))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight.t()).square().sum()

    def program(here: Here) -> tuple[int, float]:
        model: Any = terashard.fully_shard(here.model, mesh=mesh_of(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = ShardedGradScaler("cpu", **SETTINGS)
        scaler.scale(model(torch.ones(2, 2))).backward()
        gradient = _local(model.weight.grad)
        gradient.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        return gradient.numel(), scaler.get_scale()

    assert run("ours", program, 3, Small) == [(2, 4.0), (0, 4.0), (0, 4.0)]


def test_lists_of_rows_are_unscaled_and_looked_at() -> None:
    """A row that stands twice overflows if its sum does: 2 * 8 * 3e37 is too large."""
    for value, scale in ((1.0, 8.0), (3e37, 4.0), (float("inf"), 4.0)):
        table = nn.Embedding(4, 2, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        scaler = ShardedGradScaler("cpu", init_scale=8.0)
        scaler.scale(table(torch.tensor([1, 1])).sum() * value).backward()
        scaler.unscale_(optimizer)
        assert table.weight.grad is not None
        if value == 1.0:
            assert torch.equal(table.weight.grad.to_dense()[1], torch.full((2,), 2.0))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale


def test_gradients_in_float16_are_refused_with_a_reason() -> None:
    p = nn.Parameter(torch.ones(2, dtype=torch.float16))
    p.grad = torch.ones(2, dtype=torch.float16)
    scaler = ShardedGradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match=r"float16 cannot be unscaled.*param_dtype=torch\.float16"):
        scaler.unscale_(torch.optim.SGD([p], lr=0.1))


def test_a_scaler_that_is_off_says_nothing() -> None:
    def program(rank: int) -> None:
        if rank == 0:  # the other rank would be waited for
            p = nn.Parameter(torch.ones(2))
            p.grad = torch.full((2,), float("inf"))
            scaler = ShardedGradScaler("cpu", enabled=False)
            scaler.step(torch.optim.SGD([p], lr=0.1))

    run_ranks(2, program)


def test_a_second_look_before_the_update_is_refused_as_by_torch() -> None:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = torch.optim.SGD([p], lr=0.1)
    scaler = ShardedGradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


def halves(rank: int) -> float:
    """Two models, each on two of four ranks; the second overflows."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    scaler = ShardedGradScaler("cpu", process_group=groups[rank // 2], init_scale=8.0)
    for _ in range(1 + rank // 2):  # the halves take another number of steps
        p = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([p], lr=0.1)
        scaler.scale((p * (float("inf") if rank == 3 else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


def test_a_group_decides_by_itself() -> None:
    assert run_ranks(4, halves) == [8.0, 8.0, 2.0, 2.0]


def half_precision(rank: int) -> tuple[bool, bool]:
    """Compute in float16 with a scale that overflows there, then with one that does not."""
    model: Any = seeded(Net()).float()
    policy = terashard.MixedPrecisionPolicy(param_dtype=torch.float16)
    terashard.fully_shard(model, mesh=mesh_of(2), mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=2.0**24)
    moved = []
    for _ in range(2):
        optimizer.zero_grad()
        before = model.head.bias._local_tensor.clone()
        scaler.scale(loss_of(model, words(rank, 0)).float()).backward()
        scaler.step(optimizer)
        scaler.update(16.0)
        moved.append(not torch.equal(before, model.head.bias._local_tensor))
    return moved[0], moved[1]


@pytest.mark.processes
def test_an_overflow_in_float16_is_skipped_between_processes() -> None:
    assert run_processes(2, half_precision) == [(False, True)] * 2
