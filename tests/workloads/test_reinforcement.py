"""WarpSci: learning on the device, many passes without gradients per update, state in buffers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
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

ROOMS, WIDTH, TICKS = 3, 4, 20


class World(nn.Module):
    """Many environments as one tensor that is changed in place and never starts anew."""

    state: Tensor
    clock: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(ROOMS, WIDTH))
        self.register_buffer("clock", torch.zeros((), dtype=torch.int64))

    def advance(self, action: Tensor) -> Tensor:
        """The reward of every room."""
        self.state.mul_(0.5).add_(action, alpha=0.5)
        self.clock += 1
        return -self.state.square().sum(dim=1)


class Agent(nn.Module):
    """Policy and value of a state that is seen relative to the mean of all explored ones."""

    seen: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh())
        self.policy, self.value = nn.Linear(8, WIDTH), nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled():
            self.seen += 1
            self.mean += (state.mean(dim=0) - self.mean) / self.seen
        hidden = self.body(state - self.mean)
        return self.policy(hidden), self.value(hidden)


def explore(model: Any, quiet: Callable[[], Any], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """States, actions and returns of a rollout; the buffers move on."""
    states, actions, rewards = [], [], []
    with quiet():
        for tick in range(TICKS):
            states.append(model.world.state.clone())
            middle, _ = model(states[-1])
            actions.append(middle + noise(seed + tick, ROOMS, WIDTH))
            rewards.append(model.world.advance(actions[-1]))
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0) / TICKS
    return torch.cat(states).clone(), torch.cat(actions).clone(), returns.flatten().clone()


def loss(model: Any, rank: int, step: int, quiet: Callable[[], Any]) -> Tensor:
    states, actions, returns = explore(model, quiet, 1000 * step + 100 * rank)
    middle, value = model(states)
    gain = (returns - value[:, 0]).detach()
    of_policy = (gain * (actions - middle).square().sum(dim=1)).mean()
    out: Tensor = of_policy + (value[:, 0] - returns).square().mean()
    return out


def train(run: Run, quiet: Callable[[], Any] = torch.no_grad, *, looks: bool = False) -> None:
    """Explore and learn, and with ``looks`` explore once more before the optimizer's step."""
    optimizer = run.optimizer_of(run.models[0].parameters())

    def look() -> None:
        for rank, (model,) in run.replicas.items():
            explore(model, quiet, 5000 + 100 * rank)

    for step in range(3):
        run.step(partial(loss, quiet=quiet), optimizer, before=look if looks else lambda: None)
        ticks = TICKS * (step + 1) * (2 if looks else 1)
        assert all(int(model.world.clock) == ticks for (model,) in run.replicas.values())


def build() -> list[nn.Module]:
    return [seeded(Agent())]


UNITS = units(lambda m: [m.body])


@over(*OURS, TORCH)
def test_many_passes_without_gradients_and_buffers_changed_in_place(
    optimizer: str, layout: Layout
) -> None:
    equal_to_one_process(build, UNITS, train, optimizer, layout)


@over(*OURS)
def test_many_passes_in_inference_mode(optimizer: str, layout: Layout) -> None:
    in_inference_mode = partial(train, quiet=torch.inference_mode)
    equal_to_one_process(build, UNITS, in_inference_mode, optimizer, layout)


@over(*OURS)
def test_what_was_gathered_before_a_step_is_not_used_after_it(
    optimizer: str, layout: Layout
) -> None:
    """Under torch's engine the root's parameters are, and the next gradients are wrong."""
    equal_to_one_process(build, UNITS, partial(train, looks=True), optimizer, layout)
