"""Sparse voxel convolution on ragged inputs, with a branch that the data of one rank alone takes."""

import torch
from torch import Tensor, nn

from tests.shard.engines import seeded
from tests.workloads.harness import Run, both_optimizers, equal_to_one_process, noise, units

CHANNELS, OFFSETS = 4, 3


class SparseConvolution(nn.Module):
    """A weight per offset; neighbours are found by gathering, results added by scattering."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(OFFSETS, CHANNELS, CHANNELS))

    def forward(self, features: Tensor, places: Tensor) -> Tensor:
        out = torch.zeros_like(features)
        for offset in range(OFFSETS):
            pairs = (places[None] == places[:, None] + offset - 1).nonzero()
            out = out.index_add(0, pairs[:, 0], features[pairs[:, 1]] @ self.weight[offset])
        return out


class Voxels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.fine, self.last = (SparseConvolution() for _ in range(3))
        self.head = nn.Linear(CHANNELS, 1)

    def forward(self, features: Tensor, places: Tensor) -> Tensor:
        x = torch.tanh(self.first(features, places))
        if len(places) > 6:  # only crowded scenes are refined
            x = x + torch.tanh(self.fine(x, places))
        out: Tensor = self.head(torch.tanh(self.last(x, places)))
        return out


def scene(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Rank 0 has crowded scenes from the second step on, the others never."""
    count = 8 if rank == 0 and step > 0 else 3 + rank
    generator = torch.Generator().manual_seed(10 * step + rank)
    return noise(10 * step + rank, count, CHANNELS), torch.randperm(12, generator=generator)[:count]


def train(run: Run) -> None:
    model = run.models[0]
    optimizer = run.optimizer_of(model.parameters())
    for step in range(4):
        run.step(optimizer, lambda r, s=step: model(*scene(r, s)).square().mean())
        assert ("fine.weight" in run.told[-1][1]) is (step > 0)


@both_optimizers
def test_a_branch_taken_on_one_rank_only_trains(optimizer: str) -> None:
    equal_to_one_process(
        lambda: [seeded(Voxels())],
        units(lambda m: [m.first, m.fine, m.last]),
        train,
        optimizer,
        shape=(3,),
    )
