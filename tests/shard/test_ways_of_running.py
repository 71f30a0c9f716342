"""Passes in any order, unused units, passes that fail: the gradients are those of one process."""

import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import terashard
from terashard.errors import RunError
from terashard.shard.landing import Landing
from tests.helpers.processes import run_processes
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
    whole,
    words,
)

POOLS = ["static", "any", "off"]


def net() -> nn.Module:
    return seeded(Net(5))


@pytest.mark.parametrize("pool", POOLS)
def test_two_forwards_then_one_backward(pool: str) -> None:
    def program(here: Here) -> Any:
        shard(here.model, 2, pool=pool)
        for _ in range(2):
            here.model.zero_grad()
            first, second = (loss_of(here.model, words(here.rank, s)) for s in (0, 1))
            (first + 2 * second).backward()
        return gradients(here.model)

    def loss(rank: int) -> Callable[[nn.Module], Tensor]:
        return lambda m: loss_of(m, words(rank, 0)) + 2 * loss_of(m, words(rank, 1))

    expected = mean_gradients(net(), [loss(0), loss(1)])
    for found in run("ours", program, 2, net):
        same(found, expected)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("last_first", [False, True])
def test_forwards_then_backwards_in_any_order(last_first: bool, pool: str) -> None:
    """As token slices run: all forwards, then backwards, here in both orders."""

    def program(here: Here) -> Any:
        shard(here.model, 2, pool=pool)
        for _ in range(2):
            here.model.zero_grad()
            losses = [loss_of(here.model, words(here.rank, s)) for s in range(4)]
            for loss in reversed(losses) if last_first else losses:
                loss.backward()
        return gradients(here.model)

    def loss(rank: int) -> Callable[[nn.Module], Tensor]:
        return lambda m: torch.stack([loss_of(m, words(rank, s)) for s in range(4)]).sum()

    expected = mean_gradients(net(), [loss(0), loss(1)])
    for found in run("ours", program, 2, net):
        same(found, expected)


@pytest.mark.parametrize("pool", POOLS)
def test_forwards_and_backwards_interleaved(pool: str) -> None:
    def program(here: Here) -> Any:
        shard(here.model, 2, pool=pool)
        a = loss_of(here.model, words(here.rank, 0))
        b = loss_of(here.model, words(here.rank, 1))
        a.backward()
        c = loss_of(here.model, words(here.rank, 2))
        c.backward()
        b.backward()
        return gradients(here.model)

    def loss(rank: int) -> Callable[[nn.Module], Tensor]:
        return lambda m: torch.stack([loss_of(m, words(rank, s)) for s in range(3)]).sum()

    expected = mean_gradients(net(), [loss(0), loss(1)])
    for found in run("ours", program, 2, net):
        same(found, expected)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_over_several_units(reentrant: bool, pool: str) -> None:
    class Checked(Net):
        def forward(self, batch: Tensor) -> Tensor:
            def middle(x: Tensor) -> Tensor:
                for block in self.blocks:
                    x = block(x)
                return x

            x = checkpoint(middle, self.embed(batch), use_reentrant=reentrant)
            out: Tensor = self.head(x)
            return out

    def build() -> nn.Module:
        return seeded(Checked(5))

    def program(here: Here) -> Any:
        shard(here.model, 2, pool=pool)
        for _ in range(2):
            here.model.zero_grad()
            losses = [loss_of(here.model, words(here.rank, s)) for s in range(2)]
            for loss in losses:
                loss.backward()
        return gradients(here.model)

    def loss(rank: int) -> Callable[[nn.Module], Tensor]:
        return lambda m: loss_of(m, words(rank, 0)) + loss_of(m, words(rank, 1))

    expected = mean_gradients(build(), [loss(0), loss(1)])
    for found in run("ours", program, 2, build):
        same(found, expected)


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_passes_without_gradients_between_steps(quiet: Callable[[], Any]) -> None:
    def program(here: Here) -> Any:
        shard(here.model, 2)
        with quiet():
            here.model(words(here.rank, 7))
        optimizer = torch.optim.SGD(here.model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(here.model, words(here.rank, step)).backward()
            optimizer.step()
            with quiet():
                out = here.model(words(here.rank, 7))
        return out, whole(here.model.state_dict())

    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        mean_gradients(plain, [lambda m, r=r, s=step: loss_of(m, words(r, s)) for r in (0, 1)])
        optimizer.step()
    for rank, (out, values) in enumerate(run("ours", program, 2, net)):
        same(out.clone(), plain(words(rank, 7)).detach())
        same(values, dict(plain.state_dict()))


def test_values_set_through_data_between_passes_are_seen() -> None:
    """The usual way to put averages in; it raises no version counter."""

    def program(here: Here) -> Any:
        shard(here.model, 2)
        loss_of(here.model, words(here.rank, 0)).backward()
        for p in here.model.parameters():
            p.data.mul_(0.5)
        with torch.no_grad():
            first = here.model(words(0, 1))
            for p in here.model.parameters():
                p.data.mul_(2.0)
            return first, here.model(words(0, 1))

    plain = net()
    expected = plain(words(0, 1)).detach()
    for p in plain.parameters():
        p.data.mul_(0.5)
    for found in run("ours", program, 2, net):
        same(found, (plain(words(0, 1)).detach(), expected))


class Branching(Net):
    """The second block runs if ``takes``; a dead layer never runs."""

    def __init__(self) -> None:
        super().__init__(4)
        self.dead = nn.Linear(3, 3)
        self.takes = True

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        for index, block in enumerate(self.blocks):
            if index != 1 or self.takes:
                x = block(x)
        out: Tensor = self.head(x)
        return out


def branching(model: nn.Module, batch: Tensor, takes: bool) -> Tensor:
    model.takes = takes  # type: ignore[assignment]
    return loss_of(model, batch)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("first", [0, 2])
def test_a_unit_that_one_rank_skips_has_its_part_of_the_gradient(first: int, pool: str) -> None:
    """From the first step on, or from the third, when the order has been agreed."""
    build = lambda: seeded(Branching())  # noqa: E731

    def program(here: Here) -> Any:
        mesh = mesh_of(2)
        terashard.fully_shard(here.model.dead, mesh=mesh, pool=pool)
        shard(here.model, 2, pool=pool)
        told = []
        for step in range(4):
            here.model.zero_grad()
            takes = here.rank == 0 or step < first
            branching(here.model, words(here.rank, step), takes).backward()
            told.append(gradients(here.model))
        return told

    plain = build()
    expected = [
        mean_gradients(
            plain,
            [
                lambda m, s=step: branching(m, words(0, s), True),
                lambda m, s=step: branching(m, words(1, s), s < first),
            ],
        )
        for step in range(4)
    ]
    assert expected[0]["dead.weight"] is None
    for found in run("ours", program, 2, build):
        same(found, expected)


def test_a_unit_that_no_rank_uses_has_no_gradient() -> None:
    build = lambda: seeded(Branching())  # noqa: E731

    def program(here: Here) -> Any:
        terashard.fully_shard(here.model.dead, mesh=mesh_of(2))
        shard(here.model, 2)
        for step in range(2):
            here.model.zero_grad()
            branching(here.model, words(here.rank, step), False).backward()
        placed = isinstance(here.model.dead.weight, DTensor)
        return placed, {n for n, g in gradients(here.model).items() if g is None}

    for placed, absent in run("ours", program, 2, build):
        assert placed
        expected = {"dead.weight", "dead.bias"}
        expected |= {f"blocks.1.{n}.{k}" for n in ("up", "down") for k in ("weight", "bias")}
        assert absent == expected


def test_all_ranks_alike_may_promise_so_and_then_unused_units_cost_nothing() -> None:
    build = lambda: seeded(Branching())  # noqa: E731

    def program(here: Here) -> Any:
        terashard.fully_shard(here.model.dead, mesh=mesh_of(2))
        shard(here.model, 2)
        here.model.set_reduce_scatter_unused_params(False)
        for step in range(2):
            here.model.zero_grad()
            branching(here.model, words(here.rank, step), step == 0).backward()
        traffic = here.model.dead._own.units[0].traffic
        assert traffic.gathers == traffic.reductions == 0
        return gradients(here.model)

    plain = build()
    expected = mean_gradients(
        plain, [lambda m, r=r: branching(m, words(r, 1), False) for r in (0, 1)]
    )
    for found in run("ours", program, 2, build):
        same(found, expected)


class Reordering(Net):
    """Runs its blocks in the order that it is told."""

    order: tuple[int, ...] = (0, 1, 2)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        for index in self.order:
            x = self.blocks[index](x)
        out: Tensor = self.head(x)
        return out


def reordered(model: nn.Module, batch: Tensor, order: tuple[int, ...]) -> Tensor:
    model.order = order  # type: ignore[assignment]
    return loss_of(model, batch)


def test_any_order_and_number_of_uses_that_all_ranks_share_is_right() -> None:
    build = lambda: seeded(Reordering())  # noqa: E731
    orders = [(2, 0, 1), (2, 0, 1), (0, 1, 0, 2), (0, 1, 0, 2), (1,), (0, 1, 2)]

    def program(here: Here) -> Any:
        shard(here.model, 2)
        told = []
        for step, order in enumerate(orders):
            here.model.zero_grad()
            reordered(here.model, words(here.rank, step), order).backward()
            told.append(gradients(here.model))
        return told

    plain = build()
    expected = [
        mean_gradients(
            plain, [lambda m, r=r, s=s, o=o: reordered(m, words(r, s), o) for r in (0, 1)]
        )
        for s, o in enumerate(orders)
    ]
    for found in run("ours", program, 2, build):
        same(found, expected)


def disagreeing(rank: int, theirs: tuple[int, ...], at: int) -> None:
    """Two ranks, of which the second uses its blocks otherwise at step ``at``."""
    model = seeded(Reordering())
    shard(model, 2)
    for step in range(at + 1):
        order = theirs if step == at and rank == 1 else (0, 1, 2)
        model.zero_grad()
        reordered(model, words(rank, step), order).backward()


@pytest.mark.processes
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("theirs", [(0, 2, 1), (0, 1, 0, 2)])
def test_another_order_or_number_on_one_rank_is_an_error_within_seconds(
    theirs: tuple[int, ...], at: int
) -> None:
    with pytest.raises(RunError, match=r"rank.*unit blocks\.\d") as caught:
        run_processes(2, disagreeing, theirs, at, timeout=15.0)
    assert re.search(r"rank\w* [01]", str(caught.value))


def test_averages_of_shards_are_shards_of_averages() -> None:
    def program(here: Here) -> Any:
        shard(here.model, 2)
        average = deepcopy(here.model)
        assert not isinstance(average, terashard.ShardedModule)
        assert type(average) is Net
        optimizer = torch.optim.SGD(here.model.parameters(), lr=0.1)
        for step in range(3):
            loss_of(here.model, words(here.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for kept, p in zip(average.parameters(), here.model.parameters(), strict=True):
                    kept.lerp_(p, 0.25)
        here.model.load_state_dict(average.state_dict())
        return whole(here.model.state_dict())

    plain = net()
    average = deepcopy(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        mean_gradients(plain, [lambda m, r=r, s=step: loss_of(m, words(r, s)) for r in (0, 1)])
        optimizer.step()
        with torch.no_grad():
            for kept, p in zip(average.parameters(), plain.parameters(), strict=True):
                kept.lerp_(p, 0.25)
    for found in run("ours", program, 2, net):
        same(found, dict(average.state_dict()))


def test_an_inplace_change_of_an_output_that_is_a_view_is_harmless() -> None:
    class Viewing(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(x.shape)

    class Changing(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Viewing() for _ in range(4))

        def forward(self, batch: Tensor) -> Tensor:
            x = self.embed(batch)
            for block in self.blocks:
                y = block(x)
                y += x
                x = y
            out: Tensor = self.head(x)
            return out

    def build() -> nn.Module:
        return seeded(Changing())

    def program(here: Here) -> Any:
        shard(here.model, 2)
        loss_of(here.model, words(here.rank, 0)).backward()
        return gradients(here.model)

    expected = mean_gradients(build(), [lambda m, r=r: loss_of(m, words(r, 0)) for r in (0, 1)])
    for found in run("ours", program, 2, build):
        same(found, expected)


def test_ranks_that_start_from_different_values_are_told_so() -> None:
    def program(here: Here) -> None:
        with torch.no_grad():
            here.model.blocks[2].up.bias.add_(here.rank)
        shard(here.model, 2)
        loss_of(here.model, words(here.rank, 0))

    with pytest.raises(RunError, match=r"different values of parameter blocks\.2\.up\.bias"):
        run("ours", program, 2, net)


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_sums_are_on_their_way_than_was_said(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    issue, flying = Landing.issue, []

    def noted(landing: Landing) -> None:
        issue(landing)
        flying.append(landing)

    monkeypatch.setattr(Landing, "issue", noted)

    def program(here: Here) -> int:
        model = shard(here.model, 2)
        model.set_reduce_scatter_max_input_buffers(most)
        found = 0
        for step in range(2):
            loss = loss_of(model, words(here.rank, step))
            loss.backward()
        root = model._sharding.root
        for unit in root.units:
            root._sum(unit)
            found = max(found, len(root._flying))
        root._land_all()
        root.abandon()
        return found

    assert run("ours", program, 2, net) == [most, most]
