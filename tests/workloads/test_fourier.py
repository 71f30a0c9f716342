"""DPOT: a Fourier operator with complex weights, rolled out inside one loss, with noise."""

import torch
from torch import Tensor, nn

from tests.workloads.harness import Run, both_optimizers, equal_to_one_process, noise, units

WIDTH, MODES, POINTS, ROLLS = 3, 4, 10, 3


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, MODES, dtype=torch.complex128))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x, dim=1)
        low = torch.einsum("bkc,cdk->bkd", waves[:, :MODES], self.weight)
        rest = torch.zeros_like(waves[:, MODES:])
        back = torch.fft.irfft(torch.cat([low, rest], dim=1), n=x.shape[1], dim=1)
        return x + torch.tanh(back + self.mix(x))


def build() -> list[nn.Module]:
    model = nn.Sequential(Spectral(), Spectral()).double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
            if p.is_complex():
                p.add_(0.3j * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    assert model[0].weight.is_complex()
    return [model]


def train(run: Run) -> None:
    model = run.models[0]
    optimizer = run.optimizer_of(model.parameters())

    def loss(rank: int, step: int) -> Tensor:
        x = noise(10 * step + rank, 2, POINTS, WIDTH)
        total = torch.zeros((), dtype=torch.float64)
        for roll in range(ROLLS):
            x = model(x + 0.01 * noise(1000 + 100 * roll + 10 * step + rank, 2, POINTS, WIDTH))
            total = total + (x - noise(roll, 2, POINTS, WIDTH)).square().mean()
        return total

    for step in range(3):
        run.step(optimizer, lambda r, s=step: loss(r, s))


@both_optimizers
def test_complex_weights_rolled_out_train(optimizer: str) -> None:
    equal_to_one_process(build, units(list), train, optimizer)
