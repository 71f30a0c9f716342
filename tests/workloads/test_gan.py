"""A GAN: transposed convolutions, normalisation over the batch, two models, two optimizers.

The discriminator is used twice before one backward, and frozen while the generator steps.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from tests.shard.engines import seeded
from tests.workloads.harness import Run, both_optimizers, equal_to_one_process, noise, units


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.BatchNorm2d(4), nn.Tanh())
        self.last = nn.ConvTranspose2d(4, 1, 3, stride=2)

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(z))
        return out


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 3, 3, stride=2), nn.LeakyReLU())
        self.last = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).flatten(1))
        return out


def train(run: Run) -> None:
    generator, critic = run.models
    of_generator = run.optimizer_of(generator.parameters())
    of_critic = run.optimizer_of(critic.parameters())

    def critics(rank: int, step: int) -> Tensor:
        real = noise(100 * step + rank, 2, 1, 5, 5)
        fake = generator(noise(100 * step + rank + 50, 2, 3, 1, 1)).detach()
        return F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()

    def generators(rank: int, step: int) -> Tensor:
        return F.softplus(-critic(generator(noise(100 * step + rank + 70, 2, 3, 1, 1)))).mean()

    for step in range(3):
        run.step(of_critic, lambda r, s=step: critics(r, s), model=critic)
        critic.requires_grad_(False)
        run.step(of_generator, lambda r, s=step: generators(r, s), model=generator)
        critic.requires_grad_(True)


def build() -> list[nn.Module]:
    generator = seeded(Generator(), 1)
    generator.first[1].eval()  # type: ignore[operator, index, union-attr]
    generator.first[1].track_running_stats = False  # type: ignore[index, union-attr, assignment]
    return [generator, seeded(Discriminator(), 2)]


@both_optimizers
def test_two_models_train_against_each_other(optimizer: str) -> None:
    equal_to_one_process(
        build,
        units(lambda g: [g.first], lambda d: [d.first]),
        train,
        optimizer,
    )
