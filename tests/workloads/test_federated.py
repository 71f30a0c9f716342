"""SLoRA: masked full tuning, then LoRA born from the accumulated difference, the base frozen."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.shard.engines import seeded, whole
from tests.workloads.harness import (
    OURS,
    TORCH,
    Layout,
    Run,
    assign,
    equal_to_one_process,
    noise,
    over,
    placed_as,
    units,
)

WIDTH, RANK, STEPS = 6, 2, 3


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Parameter(torch.zeros(RANK, WIDTH))
        self.up = nn.Parameter(torch.zeros(WIDTH, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + x @ self.down.t() @ self.up.t())

    def tune(self, *, base: bool) -> None:
        """Train the base, or what is added to it."""
        self.base.requires_grad_(base)
        self.down.requires_grad_(not base)
        self.up.requires_grad_(not base)


def build() -> list[nn.Module]:
    model: Any = seeded(nn.Sequential(LowRank(), LowRank()))
    for layer in model:
        assign(layer.down, torch.zeros(RANK, WIDTH))
        assign(layer.up, torch.zeros(WIDTH, RANK))
    return [model]


def mask(index: int) -> Tensor:
    """The third of a base weight that is tuned."""
    generator = torch.Generator().manual_seed(index)
    return torch.rand(WIDTH, WIDTH, generator=generator, dtype=torch.float64) < 1 / 3


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    error: Tensor = model(noise(10 * step + rank, 3, WIDTH)) - noise(500 + step, 3, WIDTH)
    return error.square().mean()


def train(run: Run) -> None:
    before = tune_masked(run)
    become_low_rank(run, before)
    tune_low_rank(run)


def tune_masked(run: Run) -> dict[str, Tensor]:
    """Tune the base where the mask says; all values as they were before."""
    model = run.models[0]
    before = whole(run.parameters)
    for layer in model:
        layer.tune(base=True)
    optimizer = run.optimizer_of(layer.base.weight for layer in model)

    def cover() -> None:
        for index, layer in enumerate(model):
            gradient = layer.base.weight.grad
            gradient.mul_(placed_as(gradient, mask(index).double()))

    for _ in range(STEPS):
        found = run.step(loss, optimizer, before=cover)
        assert found == ["0.base.weight", "1.base.weight"]
    optimizer.zero_grad()
    after = whole(run.parameters)
    for index, name in enumerate(found):
        assert torch.equal(after[name] != before[name], mask(index)), "only what the mask covers"
    return before


def become_low_rank(run: Run, before: dict[str, Tensor]) -> None:
    """The best difference of low rank moves into what is added; the base is as it was."""
    after = whole(run.parameters)
    for index, layer in enumerate(run.models[0]):
        name = f"{index}.base.weight"
        u, s, v = torch.linalg.svd(after[name] - before[name])
        largest = u.abs().argmax(dim=0, keepdim=True)
        sign = u.gather(0, largest).sign()[:, :RANK]  # a singular vector has none of its own
        assign(layer.up, u[:, :RANK] * s[:RANK] * sign)
        assign(layer.down, v[:RANK] * sign.t())
        assign(layer.base.weight, before[name])
        layer.tune(base=False)
    run.tell()


def tune_low_rank(run: Run) -> None:
    """Another optimizer, of other parameters."""
    optimizer = run.optimizer_of(p for p in run.models[0].parameters() if p.requires_grad)
    for _ in range(STEPS):
        found = run.step(loss, optimizer)
        assert found == [f"{index}.{name}" for index in range(2) for name in ("down", "up")]


@over(*OURS, TORCH)
def test_masked_tuning_then_low_rank_with_another_optimizer(optimizer: str, layout: Layout) -> None:
    equal_to_one_process(build, units(list), train, optimizer, layout)
