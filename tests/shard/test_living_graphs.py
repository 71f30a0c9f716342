"""While a graph lives, nothing it reads or feeds is lost in silence; when it dies, all goes."""

import gc
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terashard
from tests.shard.engines import (
    Here,
    Net,
    alike,
    gradients,
    loss_of,
    mean_gradients,
    mesh_of,
    run,
    same,
    seeded,
    shard,
    words,
)

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped")  # torch's advice on views


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


class Outer(Inner):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.__dict__["other"] = other

    def forward(self, x: Tensor, raw: Tensor | None = None) -> Tensor:
        assert raw is not None
        out: Tensor = self.linear(x) + self.__dict__["other"](raw)
        return out


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Inner(), Inner()
        self.c = Outer(self.a)
        self.d = Inner()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.d(self.c(self.b(self.a(x)), x))
        return out

    def __deepcopy__(self, memo: Any) -> "Whole":
        made = Whole().double()
        made.load_state_dict(self.state_dict())
        return made


@pytest.mark.parametrize("setter", ["set_reshard_after_backward", "set_reshard_after_forward"])
@pytest.mark.parametrize("size", [1, 2])
def test_rules_may_change_between_forward_and_backward(size: int, setter: str) -> None:
    def program(here: Here) -> Any:
        model = shard(here.model, size, engine=here.engine)
        loss_of(model, words(here.rank, 0)).backward()
        model.zero_grad()
        loss = loss_of(model, words(here.rank, 1))
        getattr(model, setter)(False)
        loss.backward()
        found = []
        for step in (2, 3):
            for module in (*model.blocks, model):
                module.reshard()
            found.append(gradients(model))
            loss_of(model, words(here.rank, step)).backward()
        return found

    alike(program, size)


def test_a_unit_that_is_used_inside_another_while_its_graph_lives_loses_no_gradient() -> None:
    """Fed with raw data, it looked as if no graph of it lived, and got other leaves."""

    def loss(model: nn.Module, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(2, 4, generator=generator, dtype=torch.float64)
        total: Tensor = model(x).square().sum()
        return total

    def program(here: Here) -> Any:
        model: Any = here.model
        for part in (model.a, model.b, model.c, model.d, model):
            terashard.fully_shard(part, mesh=mesh_of(2))
        found = []
        for _ in range(2):
            model.zero_grad()
            loss(model, here.rank).backward()
            found.append(gradients(model))
        return found

    exact = mean_gradients(seeded(Whole()), [lambda m, r=r: loss(m, r) for r in (0, 1)])
    for found in run("ours", program, 2, lambda: seeded(Whole())):
        same(found, [exact, exact])


@pytest.mark.parametrize("backward", [True, False])
def test_nothing_that_units_have_seen_outlives_its_graph(backward: bool) -> None:
    """Without the collector: a reference cycle would keep the inputs of every unit."""

    def living() -> int:
        found: dict[int, int] = {}
        for one in gc.get_objects():
            if type(one) in (Tensor, nn.Parameter):
                storage = one.untyped_storage()
                found[storage._cdata] = storage.nbytes()
        return sum(found.values())

    def program(here: Here) -> Any:
        shard(here.model, 1)
        batch = torch.zeros(256, 16, dtype=torch.long)

        def step() -> None:
            loss = loss_of(here.model, batch)
            if backward:
                loss.backward()
            here.model.zero_grad()

        step()
        gc.collect()
        gc.disable()
        try:
            before = living()
            for _ in range(4):
                step()
            return living() - before
        finally:
            gc.enable()

    assert run("ours", program, 1, lambda: seeded(Net()))[0] <= 4096


def test_a_graph_that_is_retained_may_be_run_again() -> None:
    def program(here: Here) -> Any:
        model = shard(here.model, 2, engine=here.engine)
        loss = loss_of(model, words(here.rank, 0))
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    alike(program, 2)


@pytest.mark.parametrize("pool", ["static", "any", "off"])
@pytest.mark.parametrize("edit", ["data", "local data", "in place"])
def test_a_unit_that_runs_alone_sees_values_set_before(edit: str, pool: str) -> None:
    """Outside a pass of the root; through ``.data`` no version counter is raised."""
    x = torch.ones(2, 6, dtype=torch.float64)

    def halve(parameter: Any) -> None:
        whole = {"data": lambda: parameter.data, "local data": lambda: parameter.to_local().data}
        (whole[edit]() if edit in whole else parameter).mul_(0.5)

    def program(here: Here) -> Any:
        model: Any = shard(here.model, 2, pool=pool)
        loss_of(model, words(here.rank, 0)).backward()
        model.zero_grad()
        model.blocks[1](x)
        with torch.no_grad():
            for parameter in model.parameters():
                halve(parameter)
        model.blocks[1](x + here.rank).square().sum().backward()
        return gradients(model.blocks[1])

    plain: Any = seeded(Net())
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(0.5)
    loss: Callable[..., Any] = lambda m, r: m(x + r).square().sum()  # noqa: E731
    exact = mean_gradients(plain.blocks[1], [lambda m, r=r: loss(m, r) for r in (0, 1)])
    for found in run("ours", program, 2, lambda: seeded(Net())):
        same(found, exact)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("stays", ["after backward", "and evaluated before the step"])
def test_steps_of_an_optimizer_reach_units_that_stay_full(stays: str, many: bool) -> None:
    """Steps of many tensors at once raise no version counter: training stood still."""

    def train(model: Any, rank: int) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=many)
        losses = []
        for _ in range(3):
            loss = loss_of(model, words(0, 0))
            loss.backward()
            if stays != "after backward":
                with torch.no_grad():
                    model(words(0, 0))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def program(here: Here) -> Any:
        if stays == "after backward":
            shard(here.model, 2).set_reshard_after_backward(False)
        else:
            shard(here.model, 2, reshard_after_forward=False)
        return train(here.model, here.rank)

    exact = train(seeded(Net()), 0)
    for found in run("ours", program, 2, lambda: seeded(Net())):
        same(found, exact)


def test_a_registered_method_of_a_copy_is_the_copys() -> None:
    class Summing(Net):
        def total(self) -> Tensor:
            return self.embed.weight.detach().sum()

    def program(here: Here) -> Any:
        model: Any = shard(here.model, 1)
        terashard.register_fsdp_forward_method(model, "total")
        before = model.total()
        copied = deepcopy(model)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        assert copied.total().full_tensor().item() == 0.0
        same(model.total(), before)
        return None

    run("ours", program, 1, lambda: seeded(Summing()))


@pytest.mark.parametrize("pool", ["static", "any", "off"])
def test_registered_methods_alone_may_run_in_any_order(pool: str) -> None:
    class Methodical(Net):
        def encode(self, batch: Tensor) -> Tensor:
            x = self.embed(batch)
            for index in (0, 1, 2, 3, 2, 0, 1, 3):
                x = self.blocks[index].encode(x)  # type: ignore[operator, union-attr]
            out: Tensor = self.head(x)
            return out

    def build() -> nn.Module:
        net = Methodical(4)
        for block in net.blocks:
            type(block).encode = type(block).forward  # type: ignore[attr-defined]
        return seeded(net)

    def loss(model: Any, rank: int, step: int) -> Tensor:
        total: Tensor = model.encode(words(rank, step)).square().mean()
        return total

    def program(here: Here) -> Any:
        shard(here.model, 2, pool=pool)
        for module in (*here.model.blocks, here.model):  # type: ignore[misc]
            terashard.register_fsdp_forward_method(module, "encode")
        for step in range(3):
            here.model.zero_grad()
            loss(here.model, here.rank, step).backward()
        return gradients(here.model)

    exact = mean_gradients(build(), [lambda m, r=r: loss(m, r, 2) for r in (0, 1)])
    for found in run("ours", program, 2, build):
        same(found, exact)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("pool", ["static", "any"])
def test_memory_goes_back_before_the_last_sums_unless_units_are_to_stay(
    pool: str, keep: bool
) -> None:
    def program(here: Here) -> Any:
        model: Any = shard(here.model, 2, pool=pool, reshard_after_forward=not keep)
        slots, found = None, []
        for step in range(3):
            model.zero_grad()
            loss = loss_of(model, words(here.rank, step))
            slots = slots or model._sharding.root.slots.pool.slots.values()
            found.append(sum(slot.flat().untyped_storage().nbytes() for slot in slots))
            loss.backward()
            found.append(sum(slot.flat().untyped_storage().nbytes() for slot in slots))
        return found, gradients(model)

    exact = mean_gradients(seeded(Net(5)), [lambda m, r=r: loss_of(m, words(r, 2)) for r in (0, 1)])
    for (full, left, *again), found in run("ours", program, 2, lambda: seeded(Net(5))):
        assert full > 0
        assert left == (full if keep else 0)
        assert again == [full, left] * 2
        same(found, exact)
