"""DLRM: bags of rows of ragged lengths, dense and sparse gradients, each table placed otherwise."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import terashard
from tests.shard.engines import seeded
from tests.workloads.harness import (
    OURS,
    REPLICAS,
    TORCH,
    Layout,
    Run,
    Sharder,
    equal_to_one_process,
    noise,
    over,
)

ROWS, WIDTH, BAGS = 13, 4, 3
PLACES = (Shard(0), Shard(1), Replicate(), Shard(0))
"""Of the tables: by rows, by columns, copied, and by rows again."""


class Dlrm(nn.Module):
    """Tables and a dense network; with ``sparse``, the tables by rows have sparse gradients."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        modes = ("sum", "sum", "mean", "mean")
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(ROWS, WIDTH, mode=mode, sparse=sparse and place == Shard(0))
            for mode, place in zip(modes, PLACES, strict=True)
        )
        self.bottom = nn.Sequential(nn.Linear(5, WIDTH), nn.ReLU())
        pairs = len(PLACES) * (len(PLACES) + 1) // 2
        self.top = nn.Sequential(nn.Linear(WIDTH + pairs, 6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, dense: Tensor, bags: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = self.bottom(dense)
        parts = [x, *(table(*bag) for table, bag in zip(self.tables, bags, strict=True))]
        features = torch.stack(parts, dim=1)  # [BAGS, tables + 1, WIDTH]
        above = torch.triu_indices(features.shape[1], features.shape[1], offset=1)
        products = (features @ features.mT)[:, above[0], above[1]]
        out: Tensor = self.top(torch.cat([x, products], dim=1))
        return out


def bags(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Rows and where each bag begins, per table; bags are of any length, none now and then."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in PLACES:
        lengths = torch.randint(0, 5, (BAGS,), generator=generator)
        rows = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        made.append((rows, lengths.cumsum(0) - lengths))
    return made


def placed(models: list[Any], fully_shard: Sharder) -> None:
    """Every table as ``PLACES`` says, the rest by rows; torch's engine knows no copies."""
    model = models[0]
    ours = fully_shard.layout.engine == "ours"
    for table, place in zip(model.tables, PLACES, strict=True):
        known = place if ours or place != Replicate() else Shard(0)
        fully_shard(table, shard_placement_fn=lambda _, place=known: place)
        assert isinstance(table.weight, DTensor)
        assert table.weight.placements[-1] == known
    fully_shard(model)


class Adagrad(torch.optim.Optimizer):
    """By rows, from a dense gradient: a row that nobody touched has a gradient of zeros."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.sums: dict[Any, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad.to_dense()
            before = self.sums.get(parameter, torch.zeros(len(parameter)).double())
            self.sums[parameter] = sums = before + gradient.square().mean(dim=1)
            scale = self.param_groups[0]["lr"] / (sums.sqrt() + 1e-10)
            parameter -= scale[:, None] * gradient


def optimizers(run: Run) -> list[torch.optim.Optimizer]:
    """Of the dense parameters, and of the sparse ones: ours, or in one process torch's."""
    tables = [table for table in run.models[0].tables if table.sparse]
    lazy = [table.weight for table in tables]
    dense = [p for p in run.models[0].parameters() if all(p is not q for q in lazy)]
    if not lazy:
        return [run.optimizer_of(dense)]
    ours = isinstance(lazy[0], DTensor)
    if run.optimizer == "sgd":
        row_wise = terashard.RowwiseAdagrad if ours else Adagrad
        return [run.optimizer_of(dense), row_wise(lazy, lr=0.05)]
    adam = terashard.SparseAdam if ours else torch.optim.SparseAdam
    return [run.optimizer_of(dense), adam(lazy, lr=0.05)]


def train(run: Run) -> None:
    steppers = optimizers(run)

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        seed = 10 * step + rank
        out: Tensor = (model(noise(seed, BAGS, 5), bags(seed)) - 1).square().mean()
        return out

    for _ in range(3):
        run.step(loss, *steppers)


def test_bags_are_ragged_and_some_are_empty_and_some_rows_untouched() -> None:
    made = [bag for seed in (0, 1, 10, 11, 20, 21) for bag in bags(seed)]
    lengths = [torch.diff(starts, append=torch.tensor([len(rows)])) for rows, starts in made]
    assert {0, 1, 2, 3, 4} == set(torch.cat(lengths).tolist())
    assert all(len(set(rows.tolist())) < ROWS for rows, _ in made)


@over(*OURS, REPLICAS, TORCH)
def test_tables_of_every_placement_train(optimizer: str, layout: Layout) -> None:
    equal_to_one_process(lambda: [seeded(Dlrm(False))], placed, train, optimizer, layout)


@over(*OURS, REPLICAS)
def test_tables_with_sparse_gradients_train(optimizer: str, layout: Layout) -> None:
    equal_to_one_process(lambda: [seeded(Dlrm(True))], placed, train, optimizer, layout)
