"""DPOT: a Fourier operator with complex weights, rolled out inside one loss, with noise.

Shapes: fields [samples, n, n, channels]; n changes from step to step, as data sets differ.
"""

import torch
from torch import Tensor, nn

from tests.workloads.harness import (
    OURS,
    REPLICAS,
    Layout,
    Run,
    equal_to_one_process,
    noise,
    over,
    units,
)

WIDTH, HIDDEN, MODES, ROLLS = 2, 3, 3, 3


class Fourier(nn.Module):
    """A complex network of two layers on the lowest waves, beside a real layer on every point."""

    def __init__(self, *bias: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(MODES, WIDTH, HIDDEN, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.zeros(*bias, HIDDEN, dtype=torch.complex128))
        self.second = nn.Parameter(torch.zeros(MODES, HIDDEN, WIDTH, dtype=torch.complex128))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft2(x, dim=(1, 2))
        low = torch.einsum("bhkc,kcd->bhkd", waves[:, :, :MODES], self.first) + self.bias
        low = torch.complex(low.real.relu(), low.imag.relu())
        low = torch.einsum("bhkc,kcd->bhkd", low, self.second)
        filtered = torch.cat([low, torch.zeros_like(waves[:, :, MODES:])], dim=2)
        back = torch.fft.irfft2(filtered, s=x.shape[1:3], dim=(1, 2))
        return x + torch.tanh(back + self.mix(x))


def build(*bias: int) -> list[nn.Module]:
    model = nn.Sequential(Fourier(*bias), Fourier(*bias), nn.Linear(WIDTH, WIDTH)).double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return [model]


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    points = 6 if step % 2 else 5
    seed = 100 * step + 10 * rank
    x = noise(seed, 2, points, points, WIDTH)
    total = x.new_zeros(())
    for roll in range(ROLLS):
        x = model(x + 0.1 * noise(1000 + seed + roll, *x.shape))
        total = total + (x - noise(2000 + seed + roll, *x.shape)).square().mean()
    return total


def train(run: Run) -> None:
    optimizer = run.optimizer_of(run.models[0].parameters())
    for _ in range(3):
        assert len(run.step(loss, optimizer)) == len(run.parameters)
    assert run.told[-1]["0.bias"].is_complex()


UNITS = units(lambda m: m[:2])


@over(*OURS, REPLICAS)
def test_complex_weights_rolled_out_train(optimizer: str, layout: Layout) -> None:
    equal_to_one_process(lambda: build(MODES), UNITS, train, optimizer, layout)


def test_a_complex_vector_of_uneven_shards_trains_with_adam() -> None:
    assert HIDDEN % 2
    equal_to_one_process(lambda: build(), UNITS, train, "adam", Layout())
