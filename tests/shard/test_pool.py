"""Autograd never reads a stale parameter: it gets the right one, or it raises."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from terashard.comm.threads import ThreadWorld, run_threads
from terashard.errors import RunError
from terashard.shard.pool import BufferPool
from terashard.shard.precision import Precision
from terashard.shard.unit import ShardUnit
from tests.shard.toys import Rank, assert_same, batch, loss_of, reference

ONE_SLOT = {"first": 0, "middle": 0, "last": 0}
STALE = "modified by an inplace operation"
WIDER = Precision(compute=torch.float32, master=torch.float64)


def enter(unit: ShardUnit) -> None:
    unit.gather()
    unit.wait()


def forward(here: Rank, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and outputs of every unit, gathered and released one after the other."""
    inputs, outputs = [], []
    for (_, module), unit in zip(here.named, here.units, strict=True):
        enter(unit)
        inputs.append(x.detach().requires_grad_())
        outputs.append(module(inputs[-1]))
        unit.release()
        x = outputs[-1]
    return inputs, outputs


def in_threads(work: Callable[[Rank], None]) -> None:
    """Run on a lone rank that casts into its slot, and on two that gather into theirs."""
    work(Rank.of(ThreadWorld(1), 0, shards=1, precision=WIDER, slots=ONE_SLOT))
    run_threads(2, lambda world, rank: work(Rank.of(world, rank, shards=2, slots=ONE_SLOT)))


def test_units_that_alternate_in_one_slot_give_right_gradients() -> None:
    """Two forwards before any backward, every unit regathered for every use."""

    def work(here: Rank) -> None:
        for unit in here.units:
            unit.zero_gradients()
        x, y = (here.rows(t).to(here.units[0].precision.compute) for t in batch(0))
        runs = [forward(here, part) for part in x.chunk(2)]
        for (inputs, outputs), target in reversed(list(zip(runs, y.chunk(2), strict=True))):
            owed = None
            for index in reversed(range(len(here.units))):
                enter(here.units[index])
                if owed is None:
                    out = outputs[index].detach().requires_grad_()
                    loss_of([], out, target).backward()
                    owed = out.grad
                outputs[index].backward(owed)
                here.units[index].release()
                owed = inputs[index].grad
        for unit in here.units:
            unit.reduce("shard")
            unit.wait_reduced()
        exact = here.units[0].precision.compute == torch.float64
        assert_same(here.reduced(), reference(), 1e-12 if exact else 1e-5)
        assert len({unit.parameters[0].full.data_ptr() for unit in here.units}) == 1

    in_threads(work)


def test_a_backward_while_another_unit_holds_the_slot_raises() -> None:
    def work(here: Rank) -> None:
        for unit in here.units:
            unit.zero_gradients()
        _, outputs = forward(here, here.rows(batch(0)[0]).to(here.units[0].precision.compute))
        enter(here.units[0])
        with pytest.raises(RuntimeError, match=STALE):
            outputs[1].sum().backward()

    in_threads(work)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_backward_after_release_raises_and_works_after_the_next_gather(shards: int) -> None:
    """With one shard the parameters are aliased: they are readable, and refused all the same."""

    def work(world: ThreadWorld, rank: int) -> None:
        here = Rank.of(world, rank, shards=shards)
        for unit in here.units:
            unit.zero_gradients()
        _, outputs = forward(here, batch(0)[0])
        with pytest.raises(RuntimeError, match=STALE):
            outputs[1].sum().backward(retain_graph=True)
        enter(here.units[1])
        outputs[1].sum().backward()

    run_threads(shards, work)


@pytest.mark.parametrize("full_in_between", [False, True])
def test_a_graph_of_the_last_step_is_refused_though_its_unit_is_full(full_in_between: bool) -> None:
    """Fused optimizers do not raise version counters of DTensors, so the step itself must."""
    here = Rank.of(ThreadWorld(1), 0, shards=1)
    unit = here.units[1]
    enter(unit)
    unit.zero_gradients()
    out = here.named[1][1](torch.ones(2, 7, dtype=torch.float64, requires_grad=True))
    if full_in_between:
        unit.zero_gradients()
    else:
        unit.release()
        unit.zero_gradients()
        enter(unit)
    with pytest.raises(RuntimeError, match=STALE):
        out.sum().backward()


def test_a_graph_survives_release_and_gather_when_the_step_began_while_full() -> None:
    here = Rank.of(ThreadWorld(1), 0, shards=1)
    unit = here.units[1]
    enter(unit)
    unit.zero_gradients()
    out = here.named[1][1](torch.ones(2, 7, dtype=torch.float64, requires_grad=True))
    unit.release()
    enter(unit)
    out.sum().backward()


def test_two_units_of_one_slot_at_once_are_refused_by_name() -> None:
    def work(here: Rank) -> None:
        enter(here.units[0])
        with pytest.raises(RunError, match="unit last needs slot 0, which unit first holds"):
            here.units[2].gather()
        here.units[0].release()
        enter(here.units[2])

    in_threads(work)


def test_a_slot_in_use_cannot_grow() -> None:
    slot = BufferPool(torch.device("cpu")).slot(3)
    slot.reserve(8)
    first = slot.flat()
    assert slot.flat() is first
    slot.reserve(5)
    with pytest.raises(RunError, match="slot 3 is in use with 8 bytes, not 9"):
        slot.reserve(9)


def test_memory_that_a_slot_gave_up_is_not_known_as_its_own() -> None:
    """Another tensor at that address would have been noted as a part of the slot."""
    pool = BufferPool(torch.device("cpu"))
    slot = pool.slot(0)
    slot.reserve(64)
    slot.flat()
    slot.grow(128)
    assert list(pool.by_storage) == []
    assert list(pool.by_storage.values()) == []
    assert slot.flat().nbytes == 128
    assert list(pool.by_storage.values()) == [slot]
