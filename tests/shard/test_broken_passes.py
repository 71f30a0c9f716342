"""After a pass that raised, the next has the right gradients, or an error says why it has not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terashard
from terashard.errors import RunError
from tests.shard.engines import (
    Block,
    Here,
    Net,
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


class Failing(Block):
    """A block that raises where ``fails`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.fails == "forward":
            raise ArithmeticError("forward")
        if self.fails == "backward":
            out.register_hook(_raise)  # type: ignore[no-untyped-call]
        return out


def _raise(_: Tensor) -> None:
    raise ArithmeticError("backward")


def build() -> nn.Module:
    net = Net(4)
    net.blocks = nn.ModuleList(Failing() for _ in range(4))
    return seeded(net)


def fail(here: Here, where: str, step: int = 1) -> None:
    """A pass that raises in block 2."""
    block = here.model.get_submodule("blocks.2")
    block.fails = where  # type: ignore[assignment]
    with pytest.raises(ArithmeticError):
        loss_of(here.model, words(here.rank, step)).backward()
    block.fails = ""  # type: ignore[assignment]


def expected(*steps: int, scale: float = 1.0) -> dict[str, Tensor | None]:
    plain = build()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(scale)

    def loss(rank: int) -> Callable[[nn.Module], Tensor]:
        return lambda m: sum((loss_of(m, words(rank, s)) for s in steps), torch.zeros(()))

    return mean_gradients(plain, [loss(0), loss(1)])


@pytest.mark.parametrize("pool", ["static", "any", "off"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_next_pass_is_right(where: str, pool: str) -> None:
    def program(here: Here) -> Any:
        shard(here.model, 2, pool=pool)
        loss_of(here.model, words(here.rank, 0)).backward()
        here.model.zero_grad()
        fail(here, where)
        loss_of(here.model, words(here.rank, 2)).backward()
        return gradients(here.model)

    for found in run("ours", program, 2, build):
        same(found, expected(2))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("edit", ["data", "in place"])
def test_values_set_after_it_are_seen(edit: str, where: str) -> None:
    """Through ``.data`` they raise no version counter."""

    def program(here: Here) -> Any:
        shard(here.model, 2)
        loss_of(here.model, words(here.rank, 0)).backward()
        here.model.zero_grad()
        fail(here, where)
        with torch.no_grad():
            for parameter in here.model.parameters():
                (parameter.data if edit == "data" else parameter).mul_(0.5)
        here.model.zero_grad()
        loss_of(here.model, words(here.rank, 2)).backward()
        return gradients(here.model)

    for found in run("ours", program, 2, build):
        same(found, expected(2, scale=0.5))


def test_a_failed_forward_loses_no_gradient_that_waits() -> None:
    def program(here: Here) -> Any:
        model: Any = shard(here.model, 2)
        model.set_requires_gradient_sync(False)
        loss_of(model, words(here.rank, 0)).backward()
        fail(here, "forward")
        model.set_requires_gradient_sync(True)
        loss_of(model, words(here.rank, 2)).backward()
        return gradients(model)

    for found in run("ours", program, 2, build):
        same(found, expected(0, 2))


@pytest.mark.parametrize("kind", ["no sync", "partial sums"])
def test_a_failed_backward_amid_an_accumulation_is_an_error(kind: str) -> None:
    """What it had made cannot be told from what waited before it."""

    def program(here: Here) -> Any:
        shape = (2,) if kind == "no sync" else (2, 1)
        model: Any = shard(here.model, *shape)
        wait = (
            model.set_requires_gradient_sync
            if kind == "no sync"
            else (model.set_requires_all_reduce)
        )
        wait(False)
        loss_of(model, words(here.rank, 0)).backward()
        fail(here, "backward")
        wait(True)
        with pytest.raises(RunError, match=r"gradients of earlier passes .* zero_grad\(\)"):
            loss_of(model, words(here.rank, 2))
        model.zero_grad()
        loss_of(model, words(here.rank, 2)).backward()
        return gradients(model)

    for found in run("ours", program, 2, build):
        same(found, expected(2))


def test_a_failed_backward_amid_an_accumulation_may_be_forgotten() -> None:
    def program(here: Here) -> Any:
        model: Any = shard(here.model, 2)
        model.set_requires_gradient_sync(False)
        loss_of(model, words(here.rank, 0)).backward()
        fail(here, "backward")
        model.reset_iter_state()
        model.set_requires_gradient_sync(True)
        loss_of(model, words(here.rank, 2)).backward()
        return gradients(model)

    for found in run("ours", program, 2, build):
        same(found, expected(2))


@pytest.mark.parametrize("keep", [False, True])
def test_a_registered_method_inside_forward_keeps_the_parameters_there(keep: bool) -> None:
    class Looking(Net):
        def look(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(x)
            return out

        def forward(self, batch: Tensor) -> Tensor:
            x = self.embed(batch)
            x = x + 0.1 * self.look(x) @ self.embed.weight
            for block in self.blocks:
                x = block(x)
            return self.look(x)

    def made() -> nn.Module:
        return seeded(Looking())

    def program(here: Here) -> Any:
        shard(here.model, 2, reshard_after_forward=keep)
        terashard.register_fsdp_forward_method(here.model, "look")
        loss_of(here.model, words(here.rank, 0)).backward()
        return gradients(here.model)

    exact = mean_gradients(made(), [lambda m, r=r: loss_of(m, words(r, 0)) for r in (0, 1)])
    for found in run("ours", program, 2, made):
        same(found, exact)


def test_a_weight_may_be_tied_to_one_that_is_sharded_already() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(6, 6), nn.Linear(6, 6, bias=False)

        def forward(self, batch: Tensor) -> Tensor:
            out: Tensor = self.head(torch.tanh(self.embed(batch)))
            return out

    def loss(model: nn.Module, rank: int) -> Tensor:
        total: Tensor = model(torch.arange(6) % (rank + 2)).square().sum()
        return total

    def tie(model: Any) -> nn.Module:
        model.head.weight = model.embed.weight
        return model  # type: ignore[no-any-return]

    def program(here: Here) -> Any:
        model: Any = here.model
        terashard.fully_shard(model.embed, mesh=mesh_of(2))
        tie(model)
        terashard.fully_shard(model, mesh=mesh_of(2))
        loss(model, here.rank).backward()
        return gradients(model)

    exact = mean_gradients(tie(seeded(Tied())), [lambda m, r=r: loss(m, r) for r in (0, 1)])
    for found in run("ours", program, 2, lambda: seeded(Tied())):
        same(found, exact)
