"""Adapter-ALBERT: one frozen block used over and over, an adapter per task, one task per step."""

from torch import Tensor, nn

from tests.shard.engines import seeded
from tests.workloads.harness import (
    OURS,
    TORCH,
    Layout,
    Run,
    equal_to_one_process,
    noise,
    over,
    units,
)

WIDTH, TASKS, DEPTH = 6, 3, 4
ORDER = (0, 2, 0, 1)


class Block(nn.Module):
    """Frozen but for its normalisation, as adapters are tuned."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.mix.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mix(self.norm(x))
        return out


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.up(self.down(x).relu())
        return out


class Albert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.embed.requires_grad_(False)
        self.block = Block()
        self.adapters = nn.ModuleList(Adapter() for _ in range(TASKS))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(TASKS))

    def forward(self, x: Tensor, task: int) -> Tensor:
        x = self.embed(x)
        for _ in range(DEPTH):
            x = self.adapters[task](self.block(x))
        out: Tensor = self.heads[task](x)
        return out


def train(run: Run) -> None:
    optimizer = run.optimizer_of(p for p in run.models[0].parameters() if p.requires_grad)

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        out: Tensor = model(noise(10 * step + rank, 4, 3), ORDER[step]).square().mean()
        return out

    for task in ORDER:
        found = run.step(loss, optimizer)
        tasks = {name.split(".")[1] for name in found if name.startswith(("adapters", "heads"))}
        assert tasks == {str(task)}, "only this task's adapter and head have gradients"
        assert not any("mix" in name or "embed" in name for name in found)


@over(*OURS, TORCH)
def test_adapters_of_other_tasks_are_left_alone(optimizer: str, layout: Layout) -> None:
    shard = units(lambda m: [m.block, *m.adapters])
    equal_to_one_process(lambda: [seeded(Albert())], shard, train, optimizer, layout)


@over(*OURS, TORCH)
def test_so_are_those_in_the_unit_of_one_that_is_used(optimizer: str, layout: Layout) -> None:
    shard = units(lambda m: [])
    equal_to_one_process(lambda: [seeded(Albert())], shard, train, optimizer, layout)
