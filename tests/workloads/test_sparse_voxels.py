"""Sparse voxel convolution on ragged inputs, fVDB's; one rank's data alone takes a branch.

Shapes: a batch of scenes is one list of voxels, ``places`` [n, 4] (scene, x, y, z) and ``features``
[n, channels]; n differs between ranks and steps, and a scene may be empty.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.shard.engines import seeded
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

CHANNELS, SCENES, SIDE, CROWDED = 4, 2, 3, 10
NEAR = torch.tensor(
    [[0, 0, 0], [1, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 1], [0, 0, -1]]
)


class SparseConvolution(nn.Module):
    """A weight per neighbour; neighbours are found, gathered, and scattered to their sums."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(len(NEAR), CHANNELS, CHANNELS))

    def forward(self, features: Tensor, places: Tensor) -> Tensor:
        out = torch.zeros_like(features)
        for weight, offset in zip(self.weight, NEAR, strict=True):
            beside = places + torch.cat([offset.new_zeros(1), offset])
            to, source = (beside[:, None] == places[None]).all(dim=-1).nonzero(as_tuple=True)
            out = out.index_add(0, to, features[source] @ weight)
        return out


class Voxels(nn.Module):
    """A coarse level for all scenes, a fine one for crowded batches, a number per scene.

    Crowded batches use two more units than others: one amid the others, and the last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fine, self.coarse = (SparseConvolution() for _ in range(3))
        self.head, self.detail = nn.Linear(CHANNELS, 1), nn.Linear(CHANNELS, 1)

    def forward(self, features: Tensor, places: Tensor) -> Tensor:
        x = torch.tanh(self.first(features, places))
        if len(places) >= CROWDED:
            x = x + torch.tanh(self.fine(x, places))
        halves = places // torch.tensor([1, 2, 2, 2])
        coarse, parent = torch.unique(halves, dim=0, return_inverse=True)
        pooled = x.new_zeros(len(coarse), CHANNELS).index_add(0, parent, x)
        x = torch.tanh(self.coarse(pooled, coarse))
        scenes = x.new_zeros(SCENES, CHANNELS).index_add(0, coarse[:, 0], x)
        out: Tensor = self.head(scenes)
        return out + self.detail(scenes).tanh() if len(places) >= CROWDED else out


def batch(rank: int, step: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Nobody's scenes are crowded in the first step, then those of one rank after another."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    crowded = step > 0 and rank == step % ranks
    counts = (CROWDED, 4) if crowded else (2 + rank, 0)
    cells = torch.cartesian_prod(*[torch.arange(SIDE)] * 3)
    places = []
    for scene, count in enumerate(counts):
        chosen = cells[torch.randperm(len(cells), generator=generator)[:count]]
        places.append(torch.cat([chosen.new_full((count, 1), scene), chosen], dim=1))
    return noise(10 * step + rank, sum(counts), CHANNELS), torch.cat(places)


def test_one_rank_is_crowded_in_every_step_but_the_first() -> None:
    for ranks in (2, 3, 4):
        for step in range(4):
            crowded = sum(len(batch(r, step, ranks)[1]) >= CROWDED for r in range(ranks))
            assert crowded == (step > 0)


def training_of(ranks: int) -> Callable[[Run], None]:
    def train(run: Run) -> None:
        optimizer = run.optimizer_of(run.models[0].parameters())

        def loss(model: nn.Module, rank: int, step: int) -> Tensor:
            out: Tensor = (model(*batch(rank, step, ranks)) - 1).square().mean()
            return out

        for step in range(4):
            found = set(run.step(loss, optimizer))
            branch = {"fine.weight", "detail.weight", "detail.bias"}
            assert found & branch == (branch if step > 0 else set())

    return train


@over(*OURS, REPLICAS)
def test_a_branch_taken_on_one_rank_only_trains(optimizer: str, layout: Layout) -> None:
    equal_to_one_process(
        lambda: [seeded(Voxels())],
        units(lambda m: [m.first, m.fine, m.coarse, m.detail]),
        training_of(torch.Size(layout.shape).numel()),
        optimizer,
        layout,
    )
