"""Pointerformer: the encoder once, the decoder many times through a method, and REINFORCE.

The baseline is a greedy rollout of the same weights without gradients.
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
    Sharder,
    equal_to_one_process,
    noise,
    over,
)

WIDTH, CITIES, TOURS = 5, 5, 3


class Decoder(nn.Module):
    """Has parameters and no ``forward``: it is used through ``point`` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(2 * WIDTH, WIDTH)
        self.sharpness = nn.Parameter(torch.zeros(1))

    def point(self, keys: Tensor, at: Tensor, left: Tensor) -> Tensor:
        """Log-probabilities [TOURS, CITIES] of where to go next."""
        here = torch.cat([at, keys.mean(dim=1)], dim=-1)
        scores = torch.einsum("bd,bnd->bn", torch.tanh(self.query(here)), keys)
        scores = scores * self.sharpness.exp()
        return F.log_softmax(scores.masked_fill(~left, -torch.inf), dim=-1)


class Pointer(nn.Module):
    """The root has a parameter of its own, ``start``; it is used through two methods alone."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.decoder = Decoder()
        self.start = nn.Parameter(torch.zeros(WIDTH))

    def encode(self, cities: Tensor) -> Tensor:
        out: Tensor = self.encoder(cities) + self.start
        return out

    def decode(self, keys: Tensor, at: Tensor, left: Tensor) -> Tensor:
        out: Tensor = self.decoder.point(keys, at + self.start, left)
        return out


def rollout(model: Any, cities: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    """Length of a closed tour and its log-probability; greedy without a seed."""
    keys = model.encode(cities)
    left = torch.ones(cities.shape[:2], dtype=torch.bool)
    batch, first = torch.arange(len(cities)), torch.zeros(len(cities), dtype=torch.long)
    at, length, logs = first, cities.new_zeros(len(cities)), cities.new_zeros(len(cities))
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for _ in range(CITIES - 1):
        left = left.clone()
        left[batch, at] = False
        chances = model.decode(keys, keys[batch, at], left)
        if generator is None:
            to = chances.argmax(dim=-1)
        else:
            to = torch.multinomial(chances.detach().exp(), 1, generator=generator)[:, 0]
        logs = logs + chances[batch, to]
        length = length + (cities[batch, to] - cities[batch, at]).norm(dim=-1)
        at = to
    return length + (cities[batch, first] - cities[batch, at]).norm(dim=-1), logs


def train(run: Run) -> None:
    optimizer = run.optimizer_of(run.models[0].parameters())

    def loss(model: Any, rank: int, step: int) -> Tensor:
        cities = noise(10 * step + rank, TOURS, CITIES, 2)
        with torch.no_grad():
            baseline, _ = rollout(model, cities, None)
        length, logs = rollout(model, cities, 100 * step + 10 * rank)
        return ((length - baseline).detach() * logs).mean()

    for _ in range(3):
        run.step(loss, optimizer)


def shard(models: list[Any], fully_shard: Sharder) -> None:
    model = models[0]
    for module in (model.encoder, model.decoder, model):
        fully_shard(module)
    register = fully_shard.engine.register_fsdp_forward_method
    for module, method in ((model.decoder, "point"), (model, "encode"), (model, "decode")):
        register(module, method)


@over(*OURS, TORCH)
def test_a_decoder_that_is_called_many_times_by_a_method_trains(
    optimizer: str, layout: Layout
) -> None:
    equal_to_one_process(lambda: [seeded(Pointer())], shard, train, optimizer, layout)
