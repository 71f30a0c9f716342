"""Optimizers that step on the rows that were touched: on shards as in one process."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import terashard
from terashard.errors import ConfigError, RunError
from terashard.shard.sparse import RowwiseAdagrad, SparseAdam, touched_rows
from tests.helpers.torch_threads import run_ranks
from tests.shard.engines import Here, mesh_of, run, same, whole

WIDTH = 3


# ---- optimizers on shards -----------------------------------------------------------------------


class Tables(nn.Module):
    """Two tables with lists of rows as gradients; the second is used by some ranks only."""

    def __init__(self, rows: int = 11, sparse: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.words = nn.Embedding(rows, WIDTH, sparse=sparse, dtype=torch.float64)
        self.few = nn.EmbeddingBag(3, WIDTH, mode="mean", sparse=sparse, dtype=torch.float64)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))

    def forward(self, rows: Tensor, both: bool) -> Tensor:
        out: Tensor = self.words(rows).tanh().square().sum()
        return out + self.few(rows.view(1, -1) % 2).square().sum() if both else out


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    rows = torch.randint(0, 8, (4,), generator=generator)  # some rows never
    loss: Tensor = model(rows, both=rank == 0)
    return loss


def steps(model: Any, optimizer: torch.optim.Optimizer, ranks: list[int], none: bool) -> None:
    """Three steps of two micro-batches each, on the mean of the ranks' losses."""
    for step in range(3):
        optimizer.zero_grad(set_to_none=none)
        for micro in range(2):
            for rank in ranks:
                (loss_of(model, rank, 2 * step + micro) / len(ranks)).backward()
        optimizer.step()


def by_hand(tables: list[Tensor], ranks: list[int], lr: float, eps: float) -> list[Tensor]:
    """Row-wise Adagrad in closed form, from dense gradients."""
    values = [table.detach().clone() for table in tables]
    sums = [torch.zeros(len(value), dtype=torch.float64) for value in values]
    for step in range(3):
        model: Any = Tables(len(values[0]), sparse=False)
        model.words.weight.data, model.few.weight.data = values
        for micro in range(2):
            for rank in ranks:
                (loss_of(model, rank, 2 * step + micro) / len(ranks)).backward()
        for value, total, p in zip(values, sums, (model.words, model.few), strict=True):
            gradient = p.weight.grad
            total += gradient.square().mean(dim=1)
            value -= lr * gradient / (total.sqrt() + eps)[:, None]
    return values


def expected_after_steps(kind: Any, size: int, none: bool) -> dict[str, Tensor]:
    model: Any = Tables()
    if kind is SparseAdam:
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1, betas=(0.8, 0.9))
        steps(model, optimizer, list(range(size)), none)
        return dict(model.state_dict())
    tables = [model.words.weight, model.few.weight]
    found = by_hand(tables, list(range(size)), 0.1, 1e-10)
    return dict(zip(("words.weight", "few.weight"), found, strict=True))


def make(kind: Any, model: nn.Module) -> Any:
    betas: dict[str, Any] = {"betas": (0.8, 0.9)} if kind is SparseAdam else {}
    return kind(model.parameters(), lr=0.1, **betas)


@pytest.mark.parametrize("kind", [SparseAdam, RowwiseAdagrad])
@pytest.mark.parametrize("none", [True, False])
@pytest.mark.parametrize("shape", [(2,), (5,), (2, 2)])  # of 5 ranks, two have no rows of a table
def test_steps_on_shards_are_those_of_one_process(
    kind: Any, none: bool, shape: tuple[int, ...]
) -> None:
    size = torch.Size(shape).numel()

    def program(here: Here) -> Any:
        terashard.fully_shard(here.model.few, mesh=mesh_of(*shape))
        terashard.fully_shard(here.model, mesh=mesh_of(*shape))
        steps(here.model, make(kind, here.model), [here.rank], none)
        return whole(here.model.state_dict())

    expected = expected_after_steps(kind, size, none)
    for found in run("ours", program, size, Tables):
        same(found, expected)


@pytest.mark.parametrize("kind", [SparseAdam, RowwiseAdagrad])
def test_micro_batches_may_wait_for_one_exchange(kind: Any) -> None:
    def program(here: Here) -> Any:
        model: Any = here.model
        terashard.fully_shard(model, mesh=mesh_of(2))
        optimizer = make(kind, model)
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                loss_of(model, here.rank, 2 * step + micro).backward()
            optimizer.step()
        return whole(model.state_dict())

    expected = expected_after_steps(kind, 2, True)
    for found in run("ours", program, 2, Tables):
        same(found, expected)


def test_rows_that_nobody_touched_stay_to_the_bit() -> None:
    def program(here: Here) -> Any:
        model: Any = here.model
        terashard.fully_shard(model, mesh=mesh_of(2))
        steps(model, make(SparseAdam, model), [here.rank], True)
        rows = touched_rows(model.words.weight)
        assert rows is not None
        assert (rows < model.words.weight._local_tensor.shape[0]).all()
        return whole(model.state_dict())["words.weight"]

    for found in run("ours", program, 2, Tables):
        before = Tables().words.weight
        assert torch.equal(found[8:], before[8:])
        assert not torch.equal(found[:8], before[:8])


@pytest.mark.parametrize("kind", [SparseAdam, RowwiseAdagrad])
def test_dense_gradients_move_every_row(kind: Any) -> None:
    tables: Any = Tables(sparse=False)
    optimizer = kind(tables.parameters(), lr=0.1)
    for p in tables.parameters():
        p.grad = torch.ones_like(p)
    before = deepcopy(tables.state_dict())
    optimizer.step()
    for name, value in tables.state_dict().items():
        same(before[name] - value, torch.full_like(value, 0.1), 1e-6)


# ---- their state --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SparseAdam, RowwiseAdagrad])
@pytest.mark.parametrize("dcp", [False, True])
def test_state_is_saved_in_full_and_loads_over_other_ranks(kind: Any, dcp: bool) -> None:
    def begun(here: Here) -> tuple[dict[str, Tensor], Any]:
        terashard.fully_shard(here.model, mesh=mesh_of(5))
        optimizer = make(kind, here.model)
        first_half(here.model, optimizer, here.rank)
        state = terashard.optimizer_by_name(here.model, optimizer)
        if dcp:
            found = get_optimizer_state_dict(here.model, optimizer)["state"]
            spread = {name: whole_state(own) for name, own in found.items()}
            if here.rank == 0:
                same(spread, {name: state[name] for name in spread})
        return terashard.full_state_dict(here.model), state

    def first_half(model: nn.Module, optimizer: Any, rank: int) -> None:
        loss_of(model, rank, 0).backward()
        optimizer.step()

    def second_half(model: nn.Module, optimizer: Any, ranks: list[int]) -> None:
        optimizer.zero_grad()
        for rank in ranks:
            (loss_of(model, rank, 1) / len(ranks)).backward()
        optimizer.step()

    values, state = run("ours", begun, 5, Tables)[0]
    assert state["words.weight"][{SparseAdam: "mean", RowwiseAdagrad: "sum"}[kind]].shape[0] == 11

    def resumed(here: Here) -> Any:
        terashard.fully_shard(here.model, mesh=mesh_of(2))
        terashard.load_full(here.model, values)
        optimizer = make(kind, here.model)
        terashard.load_optimizer_by_name(here.model, optimizer, state)
        if dcp:
            taken = get_optimizer_state_dict(here.model, optimizer)
            optimizer = make(kind, here.model)
            set_optimizer_state_dict(here.model, optimizer, taken)
        second_half(here.model, optimizer, [here.rank])
        return whole(here.model.state_dict())

    alone: Any = Tables()
    alone.load_state_dict(values)
    optimizer = make(kind, alone)
    terashard.load_optimizer_by_name(alone, optimizer, state)
    second_half(alone, optimizer, [0, 1])
    for found in run("ours", resumed, 2, Tables):
        same(found, dict(alone.state_dict()))


def whole_state(own: dict[str, Any]) -> dict[str, Any]:
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in own.items()}


def test_state_of_another_table_is_refused() -> None:
    def program(here: Here) -> None:
        terashard.fully_shard(here.model, mesh=mesh_of(2))
        optimizer = make(RowwiseAdagrad, here.model)
        state = {name: {"sum": torch.zeros(4)} for name in ("words.weight", "few.weight")}
        with pytest.raises(RunError, match=r"words.weight has shape \(4,\), the parameter \(11,"):
            terashard.load_optimizer_by_name(here.model, optimizer, state)

    run("ours", program, 2, Tables)


def test_accumulators_lie_as_rows_cut_over_two_axes_do() -> None:
    """Rows cut by tensor parallelism and again by sharding: the sums are those of whole rows."""

    def program(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        layer = nn.Linear(WIDTH, 6, bias=False, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(torch.arange(18).view(6, WIDTH))
        parallelize_module(layer, mesh["tp"], ColwiseParallel())
        terashard.fully_shard(layer, mesh=mesh["dp"])
        weight: Any = layer.weight
        optimizer = RowwiseAdagrad([weight], lr=0.1)
        weight.grad = weight.detach().clone()
        optimizer.step()
        sums: Tensor = optimizer.state[weight]["sum"].full_tensor()
        return sums

    expected = torch.arange(18, dtype=torch.float64).view(6, WIDTH).square().mean(dim=1)
    for found in run_ranks(4, program):
        same(found, expected)


# ---- refusals -----------------------------------------------------------------------------------


def test_row_wise_adagrad_refuses_rows_that_are_cut() -> None:
    def program(here: Here) -> None:
        terashard.fully_shard(here.model, mesh=mesh_of(3), shard_placement_fn=lambda _: Shard(1))
        with pytest.raises(ConfigError, match=r"\(11, 3\) placed \(Shard\(dim=1\),\) has no whole"):
            RowwiseAdagrad(here.model.parameters())

    run("ours", program, 3, lambda: Tables(sparse=False))


def test_a_number_has_no_rows_and_a_vector_has_rows_of_one() -> None:
    with pytest.raises(ConfigError, match="has no whole rows"):
        RowwiseAdagrad([nn.Parameter(torch.ones(()))])
    vector = nn.Parameter(torch.ones(3))
    vector.grad = torch.tensor([1.0, -2.0, 4.0])
    RowwiseAdagrad([vector], lr=0.5).step()
    assert torch.equal(vector, torch.tensor([0.5, 1.5, 0.5]))


@pytest.mark.parametrize("kind", [SparseAdam, RowwiseAdagrad])
def test_a_rate_must_be_positive(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"lr = 0.0 is no learning rate"):
        kind([nn.Parameter(torch.ones(2, 2))], lr=0.0)
