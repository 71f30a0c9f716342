"""SLoRA: masked full tuning, then LoRA born from the accumulated difference, the base frozen."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import terashard
from tests.shard.engines import seeded, whole
from tests.workloads.harness import Run, both_optimizers, equal_to_one_process, noise, units

WIDTH, RANK = 6, 2


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Parameter(torch.zeros(RANK, WIDTH))
        self.up = nn.Parameter(torch.zeros(WIDTH, RANK))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.down.t() @ self.up.t()
        return torch.tanh(out)


def build() -> list[nn.Module]:
    model: Any = seeded(nn.Sequential(LowRank(), LowRank()))
    with torch.no_grad():
        for layer in model:
            layer.down.zero_()
            layer.up.zero_()
    return [model]


def train(run: Run) -> None:
    model = run.models[0]

    def loss(rank: int, step: int) -> Tensor:
        return (model(noise(10 * step + rank, 3, WIDTH)) - noise(step, 3, WIDTH)).square().mean()

    before = {n: v for n, v in whole(model.state_dict()).items() if n.endswith("base.weight")}
    for layer in model:
        layer.down.requires_grad_(False)
        layer.up.requires_grad_(False)
    optimizer = run.optimizer_of(layer.base.weight for layer in model)
    for step in range(3):
        optimizer.zero_grad()
        for rank in run.ranks:
            (loss(rank, step) / len(run.ranks)).backward()
        run.tell_norm(model)
        with torch.no_grad():
            for layer in model:  # only every other column is tuned
                gradient = layer.base.weight.grad
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                local[:, 1::2] = 0
        optimizer.step()
    after = whole(model.state_dict())
    with terashard.full_parameters(model, writeback=True), torch.no_grad():
        for index, layer in enumerate(model):
            name = f"{index}.base.weight"
            u, s, v = torch.linalg.svd(after[name] - before[name])
            sign = torch.sign(u[:1, :RANK])  # a singular vector has no sign of its own
            layer.up.copy_(u[:, :RANK] * s[:RANK] * sign)
            layer.down.copy_(v[:RANK] * sign.t())
            layer.base.weight.copy_(before[name])
    for layer in model:
        layer.base.weight.requires_grad_(False)
        layer.down.requires_grad_(True)
        layer.up.requires_grad_(True)
    optimizer = run.optimizer_of(p for p in model.parameters() if p.requires_grad)
    for step in range(3, 6):
        run.step(optimizer, lambda r, s=step: loss(r, s))


@both_optimizers
def test_masked_tuning_then_low_rank_with_another_optimizer(optimizer: str) -> None:
    equal_to_one_process(build, units(list), train, optimizer, within=1e-7)
