"""Parameters of every kind in one module: what comes out is what one process computes."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import terashard
from terashard.shard.sparse import RowwiseAdagrad, SparseAdam, touched_rows
from tests.shard.engines import Here, gradients, mesh_of, run, same, seeded, whole

Loss = Callable[[nn.Module, int, int], Tensor]


def batch(rank: int, step: int, width: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(3, width, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    out: Tensor = model(batch(rank, step))
    return out.abs().square().mean()


def trained(
    model: nn.Module, ranks: list[int], loss: Loss, steps: int = 3, before: Any = None
) -> list[Any]:
    """Gradients, norms and values of steps with SGD on the mean of the ranks' losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    told = []
    for step in range(steps):
        if before is not None:
            before(model, step)
        optimizer.zero_grad()
        for rank in ranks:
            (loss(model, rank, step) / len(ranks)).backward()
        told.append(gradients(model))
        optimizer.step()
    return [told, whole(model.state_dict())]


def held(
    build: Callable[[], nn.Module],
    *,
    size: int = 2,
    shape: tuple[int, ...] | None = None,
    loss: Loss = loss_of,
    inner: Callable[[Any], list[nn.Module]] = lambda m: list(m.children()),
    before: Any = None,
) -> None:
    """Every inner module a unit, then the rest: equal to one process, in gradients and values."""

    def program(here: Here) -> Any:
        mesh = mesh_of(*(shape or (size,)))
        for module in inner(here.model):
            terashard.fully_shard(module, mesh=mesh)
        terashard.fully_shard(here.model, mesh=mesh)
        return trained(here.model, [here.rank], loss, before=before)

    expected = trained(deepcopy(build()), list(range(size)), loss, before=before)
    for found in run("ours", program, size, build):
        same(found, expected)


class Odd(nn.Module):
    """0-dim, tiny, uneven, transposed, empty and complex parameters beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.tiny = nn.Parameter(torch.ones(1, 6))
        self.uneven = nn.Linear(6, 7)
        self.turned = nn.Parameter(torch.ones(6, 7).t())
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.wave = nn.Parameter(torch.ones(7, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        x = self.uneven(x * self.tiny) * self.scale
        x = x @ self.turned @ self.turned.t()
        out: Tensor = x.to(torch.complex128) @ self.wave + self.empty.sum()
        return out


def odd() -> nn.Module:
    model = Odd()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if not p.is_complex():
                p.data = p.data.double()
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2)])
def test_odd_shapes_layouts_and_formats_in_one_unit(shape: tuple[int, ...]) -> None:
    size = torch.Size(shape).numel()
    held(odd, size=size, shape=shape, inner=lambda _: [])


def test_a_transposed_parameter_keeps_its_strides() -> None:
    def program(here: Here) -> Any:
        terashard.fully_shard(here.model, mesh=mesh_of(2))
        here.model.unshard()
        return here.model.turned.stride(), here.model.turned.is_contiguous()

    for found in run("ours", program, 2, odd):
        assert found == ((1, 7), False)


class Pictures(nn.Module):
    """A convolution whose weight is channels-last, and normalisation over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(3, 1, 2, 3).expand(3, 3, 2, 3)
        out: Tensor = self.norm(self.convolution(x))
        return out


def test_channels_last_and_buffers_left_alone() -> None:
    def build() -> nn.Module:
        return seeded(Pictures().eval())

    held(build)


def test_several_formats_in_one_unit() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.narrow(self.wide(x).float())
            return out

    def build() -> nn.Module:
        model = seeded(Mixed())
        model.narrow.float()
        return model

    def program(here: Here) -> Any:
        terashard.fully_shard(here.model, mesh=mesh_of(2))
        return trained(here.model, [here.rank], loss_of)

    expected = trained(build(), [0, 1], loss_of)
    for found in run("ours", program, 2, build):
        same(found, expected, 1e-5)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


@pytest.mark.parametrize("as_units", [False, True])
def test_freezing_may_change_between_steps(as_units: bool) -> None:
    def freeze(model: Any, step: int) -> None:
        model.second.weight.requires_grad_(step != 1)
        model.first.requires_grad_(step == 2)

    inner = (lambda m: list(m.children())) if as_units else (lambda _: [])
    held(lambda: seeded(Towers()), inner=inner, before=freeze)


def test_frozen_parameters_have_no_gradient_and_no_traffic() -> None:
    def program(here: Here) -> Any:
        model: Any = here.model
        model.second.requires_grad_(False)
        for module in model.children():
            terashard.fully_shard(module, mesh=mesh_of(2))
        terashard.fully_shard(model, mesh=mesh_of(2))
        loss_of(model, here.rank, 0).backward()
        assert model.second.weight.grad is None
        unit = model.second._own.units[0]
        assert all(p.full.grad is None for p in unit.parameters)
        return unit.traffic.reductions, unit.traffic.reduced_bytes

    assert run("ours", program, 2, lambda: seeded(Towers())) == [(0, 0), (0, 0)]


class Tied(nn.Module):
    """One weight in two units and twice in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight
        self.again = nn.Module()
        self.again.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        words = x.abs().mul(5).long() % 6
        x = torch.tanh(self.middle(self.embed(words)))
        out: Tensor = self.head(x) + F.linear(x, self.again.weight)  # type: ignore[arg-type]
        return out


@pytest.mark.parametrize("inner", ["none", "embed", "all"])
def test_shared_parameters_within_a_unit_and_across_units(inner: str) -> None:
    chosen: dict[str, Callable[[Any], list[nn.Module]]] = {
        "none": lambda _: [],
        "embed": lambda m: [m.embed, m.middle],
        "all": lambda m: [m.embed, m.middle, m.head],
    }
    held(lambda: seeded(Tied()), inner=chosen[inner])


def test_a_shared_parameter_is_one_object_for_ever() -> None:
    def program(here: Here) -> None:
        model: Any = here.model
        for module in (model.embed, model.head):
            terashard.fully_shard(module, mesh=mesh_of(2))
        terashard.fully_shard(model, mesh=mesh_of(2))
        for _ in range(2):
            assert model.embed.weight is model.head.weight is model.again.weight
            assert isinstance(model.head.weight, DTensor)
            loss_of(model, here.rank, 0).backward()
        assert len(list(model.parameters())) == 3

    run("ours", program, 2, lambda: seeded(Tied()))


class Bags(nn.Module):
    """Bags of rows, of different lengths, beside a dense layer."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(11, 4, mode="sum", sparse=sparse)
        self.words = nn.Embedding(7, 4, sparse=sparse)
        self.top = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.abs().mul(50).long().flatten()
        offsets = torch.tensor([0, 2, 7])
        bags = self.table(rows % 11, offsets) + self.words(rows[:3] % 5)
        out: Tensor = self.top(bags)
        return out


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_sparse_gradients_are_the_dense_ones(shape: tuple[int, ...]) -> None:
    size = torch.Size(shape).numel()

    def program(here: Here) -> Any:
        mesh = mesh_of(*shape)
        terashard.fully_shard(here.model.table, mesh=mesh)
        terashard.fully_shard(here.model, mesh=mesh)
        return trained(here.model, [here.rank], loss_of)

    expected = trained(seeded(Bags(sparse=False)), list(range(size)), loss_of)
    for found in run("ours", program, size, lambda: seeded(Bags(sparse=True))):
        same(found, expected)


@pytest.mark.parametrize("kind", [RowwiseAdagrad, SparseAdam])
def test_lazy_optimizers_on_shards_are_those_of_one_process(kind: Any) -> None:
    def steps(model: Any, ranks: list[int]) -> Any:
        tables = [model.table.weight, model.words.weight]
        lazy = kind(tables, lr=0.05)
        dense = torch.optim.SGD(model.top.parameters(), lr=0.1)
        for step in range(3):
            for optimizer in (lazy, dense):
                optimizer.zero_grad()
            for rank in ranks:
                (loss_of(model, rank, step) / len(ranks)).backward()
            lazy.step()
            dense.step()
        return whole(model.state_dict())

    def program(here: Here) -> Any:
        terashard.fully_shard(here.model, mesh=mesh_of(2))
        found = steps(here.model, [here.rank])
        assert touched_rows(here.model.words.weight) is not None
        return found

    build = lambda: seeded(Bags(sparse=True))  # noqa: E731
    expected = steps(build(), [0, 1])
    for found in run("ours", program, 2, build):
        same(found, expected)


def test_sparse_adam_is_that_of_torch() -> None:
    results = []
    for kind in (SparseAdam, torch.optim.SparseAdam):
        model: Any = seeded(Bags(sparse=True))
        optimizer: Any = kind([model.table.weight], lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, 0, step).backward()
            optimizer.step()
        results.append(whole(model.state_dict()))
    same(results[0], results[1])
