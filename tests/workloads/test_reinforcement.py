"""WarpSci: learning on the device, many passes without gradients per update, state in buffers."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.shard.engines import seeded
from tests.workloads.harness import Run, both_optimizers, equal_to_one_process, noise, units

WIDTH, STEPS = 4, 6


class Agent(nn.Module):
    """A policy whose environment lives in buffers that are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh())
        self.policy, self.value = nn.Linear(8, WIDTH), nn.Linear(8, 1)
        self.register_buffer("state", torch.zeros(2, WIDTH, dtype=torch.float64))
        self.register_buffer("clock", torch.zeros((), dtype=torch.int64))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(state)
        return self.policy(hidden), self.value(hidden)[:, 0]


def explore(model: Any, rank: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """States, actions and returns of a rollout; the model's buffers move on."""
    states, actions, rewards = [], [], []
    model.state.copy_(noise(1000 + 10 * step + rank, 2, WIDTH))
    with torch.no_grad():
        for tick in range(STEPS):
            mean, _ = model(model.state.clone())
            action = mean + noise(100 * step + 10 * tick + rank, 2, WIDTH)
            states.append(model.state.clone())
            model.state.mul_(0.5).add_(action, alpha=0.5)
            model.clock += 1
            actions.append(action)
            rewards.append(-model.state.square().sum(dim=1))
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    return torch.cat(states), torch.cat(actions), returns.flatten()


def train(run: Run) -> None:
    model = run.models[0]
    optimizer = run.optimizer_of(model.parameters())

    def loss(rank: int, step: int) -> Tensor:
        states, actions, returns = explore(model, rank, step)
        mean, value = model(states)
        gain = (returns - value).detach()
        return (gain * (actions - mean).square().sum(dim=1)).mean() + (
            value - returns
        ).square().mean()

    for step in range(3):
        run.step(optimizer, lambda r, s=step: loss(r, s))
    assert int(model.clock) == 3 * STEPS * len(run.ranks)
    model.clock.zero_()
    model.state.zero_()


@both_optimizers
def test_many_passes_without_gradients_and_buffers_changed_in_place(optimizer: str) -> None:
    equal_to_one_process(lambda: [seeded(Agent())], units(lambda m: [m.body]), train, optimizer)
