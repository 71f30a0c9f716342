"""DPOT: a Fourier operator with complex weights, rolled out inside one loss, with noise.

Shapes: fields [samples, n, n, channels]; n changes from step to step, as data sets differ.
"""

import torch
from torch import Tensor, nn

from tests.workloads.harness import OURS, Layout, Run, equal_to_one_process, noise, over, units

WIDTH, MODES, ROLLS = 3, 3, 3


class Fourier(nn.Module):
    """A complex layer on the lowest waves, beside a real one on every point."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(MODES, WIDTH, WIDTH, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.complex128))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft2(x, dim=(1, 2))
        low = torch.einsum("bhkc,kcd->bhkd", waves[:, :, :MODES], self.weight) + self.bias
        filtered = torch.cat([low, torch.zeros_like(waves[:, :, MODES:])], dim=2)
        back = torch.fft.irfft2(filtered, s=x.shape[1:3], dim=(1, 2))
        return x + torch.tanh(back + self.mix(x))


def build() -> list[nn.Module]:
    model = nn.Sequential(Fourier(), Fourier(), nn.Linear(WIDTH, WIDTH)).double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return [model]


def train(run: Run) -> None:
    optimizer = run.optimizer_of(run.models[0].parameters())

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        points = 6 if step % 2 else 5
        seed = 100 * step + 10 * rank
        x = noise(seed, 2, points, points, WIDTH)
        total = x.new_zeros(())
        for roll in range(ROLLS):
            x = model(x + 0.1 * noise(1000 + seed + roll, *x.shape))
            total = total + (x - noise(2000 + seed + roll, *x.shape)).square().mean()
        return total

    for step in range(3):
        found = run.step(lambda m, r, s=step: loss(m, r, s), optimizer)
        assert "0.weight" in found
        assert run.told[-1]["0.weight"].is_complex()


@over(*OURS)
def test_complex_weights_rolled_out_train(optimizer: str, layout: Layout) -> None:
    equal_to_one_process(build, units(lambda m: m[:2]), train, optimizer, layout)
