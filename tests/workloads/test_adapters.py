"""Adapter-ALBERT: one frozen block used over and over, an adapter per task, one task per step."""

from torch import Tensor, nn

from tests.shard.engines import seeded
from tests.workloads.harness import Run, both_optimizers, equal_to_one_process, noise, units

WIDTH, TASKS, DEPTH = 6, 3, 4


class Albert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2), nn.ReLU(), nn.Linear(2, WIDTH)) for _ in range(TASKS)
        )
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(TASKS))
        self.block.requires_grad_(False)

    def forward(self, x: Tensor, task: int) -> Tensor:
        for _ in range(DEPTH):
            x = self.block(x)
            x = x + self.adapters[task](x)
        out: Tensor = self.heads[task](x)
        return out


def train(run: Run) -> None:
    model = run.models[0]
    optimizer = run.optimizer_of(p for p in model.parameters() if p.requires_grad)
    for step, task in enumerate((0, 2, 0, 1)):
        run.step(
            optimizer,
            lambda r, s=step, t=task: model(noise(10 * s + r, 4, WIDTH), t).square().mean(),
        )
        used = {name.split(".")[1] for name in run.told[-1][1]}
        assert used == {str(task)}, "only this task's adapter and head have gradients"


@both_optimizers
def test_adapters_of_other_tasks_are_left_alone(optimizer: str) -> None:
    equal_to_one_process(
        lambda: [seeded(Albert())],
        units(lambda m: [m.block, *m.adapters]),
        train,
        optimizer,
    )
