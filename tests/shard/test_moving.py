"""Notes instead of views: a unit comes back elsewhere while a graph lives, or is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from terashard.comm.threads import ThreadWorld, run_threads
from terashard.errors import RunError
from terashard.shard.moving import saving_notes
from terashard.shard.places import Places
from terashard.shard.pool import BufferPool
from terashard.shard.unit import ShardUnit
from tests.shard.toys import Rank, assert_same, batch, loss_of, reference


def moving(world: ThreadWorld, rank: int) -> tuple[Rank, Places]:
    """The toy model on two shards, every unit free to move."""
    here = Rank.of(world, rank, shards=2)
    places = Places(torch.device("cpu"))
    for unit in here.units:
        unit._lease = unit._targets = None
        unit.assign(places.free(unit), moving=True)
    return here, places


def gathered(unit: ShardUnit, pool: BufferPool, number: int) -> None:
    slot = pool.slot(number)
    slot.reserve(unit.full_bytes)
    unit.gather(slot)
    unit.wait()


@pytest.mark.parametrize("checked", [None, False, True])
def test_units_that_move_between_forward_and_backward_give_right_gradients(
    checked: bool | None,
) -> None:
    """``checked``: under activation checkpointing, reentrant or not."""

    def work(world: ThreadWorld, rank: int) -> None:
        here, places = moving(world, rank)
        x, y = (here.rows(t) for t in batch(0))
        modules = [module for _, module in here.named]
        for unit in here.units:
            unit.zero_gradients()
        for index, unit in enumerate(here.units):
            gathered(unit, places.pool, 10 + index)

        def forward(value: Tensor) -> Tensor:
            with saving_notes(places.pool):
                for module in modules:
                    value = module(value)
            return value

        start = x.clone().requires_grad_()
        out = (
            forward(start) if checked is None else checkpoint(forward, start, use_reentrant=checked)
        )
        for unit in here.units:
            unit.release()
        for index, unit in enumerate(reversed(here.units)):
            gathered(unit, places.pool, 20 + index)
        loss_of([], out, y).backward()  # type: ignore[arg-type]
        for unit in here.units:
            unit.reduce("shard")
            unit.wait_reduced()
        assert_same(here.reduced(), reference(), 1e-12)

    run_threads(2, work)


def one(world: ThreadWorld, rank: int) -> tuple[ShardUnit, nn.Module, BufferPool, Tensor]:
    """A unit after its forward pass, released."""
    here, places = moving(world, rank)
    unit, module = here.units[1], here.named[1][1]
    unit.zero_gradients()
    gathered(unit, places.pool, 10)
    with saving_notes(places.pool):
        out = module(torch.ones(2, 7, dtype=torch.float64, requires_grad=True))
    unit.release()
    return unit, module, places.pool, out


def test_a_note_of_a_unit_that_is_not_there_is_refused() -> None:
    def work(world: ThreadWorld, rank: int) -> None:
        unit, _, pool, out = one(world, rank)
        with pytest.raises(RunError, match="unit middle, which is not full"):
            out.sum().backward(retain_graph=True)
        gathered(unit, pool, 11)
        out.sum().backward()

    run_threads(2, work)


def test_a_note_of_other_values_is_refused() -> None:
    def work(world: ThreadWorld, rank: int) -> None:
        unit, _, pool, out = one(world, rank)
        unit.zero_gradients()
        gathered(unit, pool, 11)
        with pytest.raises(RunError, match="modified by an inplace operation"):
            out.sum().backward()

    run_threads(2, work)


def test_other_tensors_go_to_the_hooks_that_were_there() -> None:
    seen: list[Any] = []

    def work(world: ThreadWorld, rank: int) -> None:
        here, places = moving(world, rank)
        unit, module = here.units[1], here.named[1][1]
        unit.zero_gradients()
        gathered(unit, places.pool, 10)
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: seen.append(t.shape) or t, lambda t: t
        )
        with hooks, saving_notes(places.pool):
            out = module(torch.ones(2, 7, dtype=torch.float64, requires_grad=True))
        out.sum().backward()

    run_threads(2, work)
    assert seen
    assert all(shape[0] == 2 for shape in seen), "activations alone, no parameters"
