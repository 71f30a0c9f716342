"""A GAN: transposed convolutions, normalisation over the batch, two models, two optimizers.

The critic is used twice before one backward, and frozen while the generator steps. Every rank
normalises over its own samples and keeps its own running statistics.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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

SAMPLES = 3


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.ConvTranspose2d(3, 4, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU()
        )
        self.last = nn.ConvTranspose2d(4, 1, 3, stride=2)

    def forward(self, z: Tensor) -> Tensor:
        return torch.tanh(self.last(self.first(z)))


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(1, 3, 3, stride=2, bias=False), nn.BatchNorm2d(3), nn.LeakyReLU()
        )
        self.last = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).flatten(1))
        return out


def train(run: Run) -> None:
    generator, critic = run.models
    of_generator = run.optimizer_of(generator.parameters())
    of_critic = run.optimizer_of(critic.parameters())

    def critics(models: Any, rank: int, step: int) -> Tensor:
        generator, critic = models
        real = noise(100 * step + rank + 70, SAMPLES, 1, 5, 5)
        fake = generator(noise(100 * step + rank, SAMPLES, 3, 1, 1)).detach()
        return F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()

    def generators(models: Any, rank: int, step: int) -> Tensor:
        generator, critic = models
        fake = generator(noise(100 * step + rank, SAMPLES, 3, 1, 1))
        return F.softplus(-critic(fake)).mean()

    for _ in range(3):
        run.step(critics, of_critic)
        critic.requires_grad_(False)
        critic.zero_grad()
        found = run.step(generators, of_generator)
        assert len(found) == len(list(generator.parameters())), "a frozen critic has no gradients"
        critic.requires_grad_(True)


@over(*OURS, TORCH)
def test_two_models_train_against_each_other(optimizer: str, layout: Layout) -> None:
    equal_to_one_process(
        lambda: [seeded(Generator(), 1), seeded(Critic(), 2)],
        units(lambda g: [g.first], lambda c: [c.first]),
        train,
        optimizer,
        layout,
    )
