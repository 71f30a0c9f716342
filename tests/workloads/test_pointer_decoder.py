"""Pointerformer: the encoder once, the decoder many times through a method, and REINFORCE.

The baseline is a greedy rollout of the same weights without gradients.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import terashard
from tests.shard.engines import seeded
from tests.workloads.harness import Run, both_optimizers, equal_to_one_process, noise

WIDTH, CITIES = 5, 4


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, at: Tensor, keys: Tensor, left: Tensor) -> Tensor:
        scores = torch.einsum("bd,bnd->bn", torch.tanh(self.query(at)), keys)
        return F.log_softmax(scores.masked_fill(~left, -1e9), dim=-1)


class Pointer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.decoder = Decoder()

    def encode(self, cities: Tensor) -> Tensor:
        out: Tensor = self.encoder(cities)
        return out

    def decode(self, at: Tensor, keys: Tensor, left: Tensor) -> Tensor:
        out: Tensor = self.decoder(at, keys, left)
        return out


def rollout(model: Any, cities: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    """Length of a tour and its log-probability; greedy without a seed."""
    keys = model.encode(cities)
    left = torch.ones(cities.shape[:2], dtype=torch.bool)
    batch = torch.arange(len(cities))
    at, length = torch.zeros(len(cities), dtype=torch.long), torch.zeros(len(cities)).double()
    logs = torch.zeros(len(cities), dtype=torch.float64)
    for step in range(CITIES - 1):
        left = left.clone()
        left[batch, at] = False
        chances = model.decode(keys[batch, at], keys, left)
        if seed is None:
            to = chances.argmax(dim=-1)
        else:
            generator = torch.Generator().manual_seed(seed + step)
            to = torch.multinomial(chances.detach().exp(), 1, generator=generator)[:, 0]
        logs = logs + chances[batch, to]
        length = length + (cities[batch, to] - cities[batch, at]).norm(dim=-1)
        at = to
    return length, logs


def train(run: Run) -> None:
    model = run.models[0]
    optimizer = run.optimizer_of(model.parameters())

    def loss(rank: int, step: int) -> Tensor:
        cities = noise(10 * step + rank, 3, CITIES, 2)
        with torch.no_grad():
            baseline, _ = rollout(model, cities, None)
        length, logs = rollout(model, cities, 100 * step + 10 * rank)
        return ((length - baseline).detach() * logs).mean()

    for step in range(3):
        run.step(optimizer, lambda r, s=step: loss(r, s))


def shard(models: list[Any], mesh: Any) -> None:
    model = models[0]
    for module in (model.encoder, model.decoder):
        terashard.fully_shard(module, mesh=mesh)
    terashard.fully_shard(model, mesh=mesh)
    for method in ("encode", "decode"):
        terashard.register_fsdp_forward_method(model, method)


@both_optimizers
def test_a_decoder_that_is_called_many_times_by_a_method_trains(optimizer: str) -> None:
    equal_to_one_process(lambda: [seeded(Pointer())], shard, train, optimizer)
