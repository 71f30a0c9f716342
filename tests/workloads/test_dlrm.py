"""DLRM: bags of rows of ragged lengths, dense and sparse gradients, each table placed otherwise."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import terashard
from tests.shard.engines import seeded
from tests.workloads.harness import Run, both_optimizers, equal_to_one_process, noise

ROWS, WIDTH = 13, 4


class Dlrm(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=sparse and k == 0) for k in range(3)
        )
        self.bottom = nn.Sequential(nn.Linear(5, WIDTH), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(4 * WIDTH, 6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, dense: Tensor, bags: list[tuple[Tensor, Tensor]]) -> Tensor:
        parts = [self.bottom(dense)]
        parts += [table(*bag) for table, bag in zip(self.tables, bags, strict=True)]
        out: Tensor = self.top(torch.cat(parts, dim=1))
        return out


def bags(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Two bags of different lengths per table, one of them empty now and then."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(3):
        lengths = torch.randint(0, 5, (2,), generator=generator)
        rows = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        made.append((rows, torch.tensor([0, int(lengths[0])])))
    return made


def placed(models: list[Any], mesh: Any) -> None:
    """The tables by row, by column and as copies; the rest by rows."""
    model = models[0]
    chosen = {
        id(model.tables[0].weight): Shard(0),
        id(model.tables[1].weight): Shard(1),
        id(model.tables[2].weight): Replicate(),
    }
    where: Callable[[nn.Parameter], Any] = lambda p: chosen.get(id(p))  # noqa: E731
    for table in model.tables:
        terashard.fully_shard(table, mesh=mesh, shard_placement_fn=where)
    terashard.fully_shard(model, mesh=mesh)


def train(run: Run) -> None:
    model = run.models[0]
    lazy = [model.tables[0].weight] if model.tables[0].sparse else []
    others = [p for p in model.parameters() if all(p is not q for q in lazy)]
    optimizers = [run.optimizer_of(others)]
    if lazy and run.optimizer == "sgd":
        optimizers.append(terashard.RowwiseAdagrad(lazy, lr=0.05))
    elif lazy:
        optimizers.append(terashard.SparseAdam(lazy, lr=0.05))

    def loss(rank: int, step: int) -> Tensor:
        seed = 10 * step + rank
        out: Tensor = model(noise(seed, 2, 5), bags(seed)).square().mean()
        return out

    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank in run.ranks:
            (loss(rank, step) / len(run.ranks)).backward()
        if not lazy:
            run.tell_norm(model)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("shape", [(2,), (3,)])
@both_optimizers
def test_tables_of_every_placement_train(
    optimizer: str, shape: tuple[int, ...], sparse: bool
) -> None:
    equal_to_one_process(lambda: [seeded(Dlrm(sparse))], placed, train, optimizer, shape=shape)


def test_the_norm_of_sparse_gradients_is_that_of_dense_ones() -> None:
    def told(sparse: bool) -> list[Any]:
        from tests.helpers.torch_threads import run_ranks
        from tests.shard.engines import mesh_of

        models = [[seeded(Dlrm(sparse))] for _ in range(2)]

        def rank(index: int) -> Any:
            placed(models[index], mesh_of(2))
            run = Run(models[index], [index], "sgd")
            model = models[index][0]
            model(noise(index, 2, 5), bags(index)).square().mean().backward()
            run.tell_norm(model)
            return run.told

        return run_ranks(2, rank)

    assert told(True)[0][0][0] == pytest.approx(told(False)[0][0][0], rel=1e-12)
