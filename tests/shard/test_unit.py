"""Units on thread meshes: gradients against the plain model, states, traffic and cost."""

import gc
import time

import pytest
import torch
from torch.distributed.tensor import DTensor

from terashard.comm.threads import ThreadWorld, run_threads
from terashard.errors import RunError
from terashard.shard.gradient import PassingGradients
from terashard.shard.precision import Precision
from terashard.shard.unit import UnitState
from tests.shard.toys import (
    Rank,
    assert_same,
    batch,
    loss_of,
    named_modules,
    parameters_of,
    reference,
)

LAYOUTS = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (3, 2)]


@pytest.mark.parametrize(("shards", "replicas"), LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
def test_reduced_gradients_match_the_plain_model(shards: int, replicas: int, tied: bool) -> None:
    expected = reference(tied=tied)

    def work(world: ThreadWorld, rank: int) -> None:
        here = Rank.of(world, rank, shards=shards, tied=tied)
        here.step(*batch(0))
        assert_same(here.reduced(), expected, 1e-12)

    run_threads(shards * replicas, work)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("compute", [torch.float64, torch.float32])
@pytest.mark.parametrize(("shards", "replicas"), [(2, 1), (3, 1), (2, 2)])
def test_sums_after_every_micro_batch_match_and_leave_no_full_gradient(
    shards: int, replicas: int, compute: torch.dtype, tied: bool
) -> None:
    """Also with a wider accumulator, 0-dim and unused parameters, and in a second step."""
    precision = Precision(compute=compute, master=torch.float64)

    def work(world: ThreadWorld, rank: int) -> None:
        kept = Rank.of(world, rank, shards=shards, precision=precision, tied=tied)
        here = Rank.of(world, rank, shards=shards, precision=precision, tied=tied, each_micro=True)
        modules = [module for _, module in here.named]
        for step in range(2):
            x, y = batch(step)
            x = x.to(compute)
            here.gather()
            for unit in here.units:
                unit.zero_gradients()
            for a, b in zip(here.rows(x).chunk(2), here.rows(y).chunk(2), strict=True):
                loss_of(modules, a, b).backward()
                for unit in reversed(here.units):
                    unit.reduce("shard")
                    unit.wait_issued()
                    assert isinstance(unit.gradients, PassingGradients)
                    assert not unit.gradients._wide
                    assert all(p.full.grad is None for p in unit.parameters)
            for unit in here.units:
                unit.release()
                unit.reduce("replica")
                unit.wait_reduced()
            kept.step(x, y)
            assert_same(here.reduced(), kept.reduced(), 1e-12)

    run_threads(shards * replicas, work)


def test_no_sum_over_shards_follows_one_over_replicas() -> None:
    here = Rank.of(ThreadWorld(2), 0, shards=2, each_micro=True)
    unit = here.units[0]
    unit.zero_gradients()
    unit._reduction.done |= {"shard", "replica"}
    with pytest.raises(RunError, match=r"reduced over 'shard' already in this step"):
        unit.reduce("shard")


@pytest.mark.parametrize("shards", [1, 2])
def test_gradients_of_float32_sum_in_float64(shards: int) -> None:
    """The accumulator is wider than the compute format: the path of the hook."""
    expected = reference()
    precision = Precision(compute=torch.float32, master=torch.float64)

    def work(world: ThreadWorld, rank: int) -> None:
        here = Rank.of(world, rank, shards=shards, precision=precision)
        here.step(*batch(0))
        assert all(p.full.grad is None for unit in here.units for p in unit.parameters)
        assert_same(here.reduced(), expected, 1e-5)

    run_threads(shards, work)


def test_a_second_step_forgets_the_first() -> None:
    def work(world: ThreadWorld, rank: int) -> None:
        here = Rank.of(world, rank, shards=2)
        here.step(*batch(0))
        here.step(*batch(1))
        assert_same(here.reduced(), reference(1), 1e-12)

    run_threads(2, work)


def test_gradients_stand_again_after_set_to_none() -> None:
    def work(world: ThreadWorld, rank: int) -> None:
        here = Rank.of(world, rank, shards=2)
        here.step(*batch(0))
        first = [p.sharded.grad for unit in here.units for p in unit.parameters]
        for unit in here.units:
            for p in unit.parameters:
                p.sharded.grad = None
        here.step(*batch(0))
        assert [p.sharded.grad for unit in here.units for p in unit.parameters] == first

    run_threads(2, work)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 2])
def test_buffers_are_the_same_in_every_step(compute: torch.dtype, shards: int) -> None:
    """No parameter, slot, accumulator or gradient is made anew after the first step."""
    precision = Precision(compute=compute, master=torch.float32)

    def addresses(here: Rank) -> list[int]:
        owned = [p for unit in here.units for p in unit.parameters]
        kept = [t for unit in here.units for t in (unit.gradients.full + unit.gradients.rows)]
        return [t.data_ptr() for t in [*kept, *(p.full for p in owned), *(p.local for p in owned)]]

    def work(world: ThreadWorld, rank: int) -> None:
        here = Rank.of(world, rank, shards=shards, precision=precision)
        here.step(*batch(0, torch.float32))
        before = addresses(here)
        here.step(*batch(1, torch.float32))
        assert addresses(here) == before

    run_threads(shards, work)


def test_with_one_shard_nothing_is_held_twice() -> None:
    here = Rank.of(ThreadWorld(1), 0, shards=1)
    here.step(*batch(0))
    for unit in here.units:
        for p in unit.parameters:
            assert p.full.data_ptr() == p.local.data_ptr()
        assert unit.gradients.flat_rows is unit.gradients.flat_full
        for p, rows in zip(unit.gradients.parameters, unit.gradients.rows, strict=True):
            assert p.full.grad.data_ptr() == rows.data_ptr()
            assert p.sharded.grad._local_tensor.data_ptr() == rows.data_ptr()


def test_a_frozen_parameter_has_no_gradient_memory() -> None:
    here = Rank.of(ThreadWorld(1), 0, shards=1)
    here.step(*batch(0))
    frozen = here.units[1].parameters[-1]
    assert frozen.name == "middle.linear.bias"
    assert not frozen.full.requires_grad
    assert frozen.sharded.grad is None
    assert frozen not in here.units[1].gradients.parameters


def test_a_unit_that_is_all_frozen_is_reduced_without_traffic() -> None:
    def work(world: ThreadWorld, rank: int) -> None:
        here = Rank.of(world, rank, shards=2)
        unit = here.units[2]
        for p in unit.parameters:
            p.trainable = False
        unit.gather()
        unit.wait()
        unit.zero_gradients()
        unit.reduce("shard")
        unit.reduce("replica")
        unit.wait_reduced()
        assert unit.gradients.flat_full.numel() == 0
        assert unit.traffic.reduced_bytes == 0

    run_threads(2, work)


def test_modules_hold_dtensors_between_steps_and_full_tensors_in_them() -> None:
    def work(world: ThreadWorld, rank: int) -> None:
        here = Rank.of(world, rank, shards=2)
        linear = here.named[0][1].linear
        public = linear.weight
        assert isinstance(public, DTensor)
        assert public.shape == (7, 5)
        here.gather()
        assert not isinstance(linear.weight, DTensor)
        assert linear.weight.shape == (7, 5)
        for unit in here.units:
            unit.release()
        assert linear.weight is public

    run_threads(2, work)


def test_wrong_transitions_are_refused_by_name() -> None:
    unit = Rank.of(ThreadWorld(1), 0, shards=1).units[0]
    with pytest.raises(
        RunError, match="unit first is SHARDED and cannot be released; it must be FULL"
    ):
        unit.release()
    with pytest.raises(RunError, match="unit first is SHARDED and cannot be waited for"):
        unit.wait()
    unit.gather()
    with pytest.raises(RunError, match="unit first is GATHERING and cannot be released"):
        unit.release()
    with pytest.raises(RunError, match="unit first is GATHERING and cannot be gathered"):
        unit.gather()
    unit.wait()
    unit.wait()
    assert unit.state is UnitState.FULL
    with pytest.raises(RunError, match="unit first is FULL and cannot be gathered"):
        unit.gather()


def test_wrong_reductions_are_refused_by_name() -> None:
    def work(world: ThreadWorld, rank: int) -> None:
        unit = Rank.of(world, rank, shards=2).units[0]
        with pytest.raises(RunError, match="unit first has no gradients, as no step has begun"):
            unit.reduce("shard")
        unit.zero_gradients()
        with pytest.raises(
            RunError, match="unit first is to be reduced over 'replica' before 'shard'"
        ):
            unit.reduce("replica")
        with pytest.raises(RunError, match="unit first were not summed over the shards"):
            unit.wait_reduced()
        unit.reduce("shard")
        with pytest.raises(RunError, match="unit first was reduced over 'shard' already"):
            unit.reduce("shard")
        with pytest.raises(RunError, match="unit first is being reduced"):
            unit.zero_gradients()
        with pytest.raises(RunError, match="none of its parameters is tied"):
            unit.reduce("tie")

    run_threads(2, work)


def test_traffic_is_counted_in_bytes_of_whole_tensors() -> None:
    def work(world: ThreadWorld, rank: int) -> None:
        here = Rank.of(world, rank, shards=2)
        here.step(*batch(0))
        traffic = here.units[2].traffic
        assert (traffic.gathers, traffic.gathered_bytes) == (1, 8 * 8)
        assert (traffic.reductions, traffic.reduced_bytes) == (2, 8 * 8)

    run_threads(2, work)


def test_a_lone_rank_pays_microseconds() -> None:
    here = Rank.of(ThreadWorld(1), 0, shards=1)
    here.step(*batch(0))
    unit = here.units[2]

    def cycle() -> float:
        begin = time.perf_counter()
        unit.gather()
        unit.wait()
        unit.release()
        unit.zero_gradients()
        unit.reduce("shard")
        unit.reduce("replica")
        unit.wait_reduced()
        return time.perf_counter() - begin

    gc.collect()
    assert min(cycle() for _ in range(200)) < 200e-6


@pytest.mark.parametrize("shards", [1, 2])
def test_bf16_gradients_are_summed_in_float32(shards: int) -> None:
    """Witness: the plain model in bf16, one micro-batch of one rank at a time, summed by hand."""
    precision = Precision(compute=torch.bfloat16, master=torch.float32)
    x, y = batch(0, torch.float32)
    expected: dict[str, torch.Tensor] = {}
    for x_rank, y_rank in zip(x.chunk(shards), y.chunk(shards), strict=True):
        for a, b in zip(x_rank.chunk(2), y_rank.chunk(2), strict=True):
            named = named_modules(dtype=torch.bfloat16)
            loss_of([module for _, module in named], a.bfloat16(), b).backward()
            for name, p in parameters_of(named).items():
                if p.requires_grad:
                    part = torch.zeros_like(p) if p.grad is None else p.grad
                    expected[name] = expected.get(name, 0) + part.float()

    def work(world: ThreadWorld, rank: int) -> None:
        here = Rank.of(world, rank, shards=shards, precision=precision)
        here.step(x, y)
        found = here.reduced()
        assert all(g.dtype is torch.float32 for g in found.values())
        assert_same(found, expected, 1e-6)

    run_threads(shards, work)


def test_first_gather_in_inference_mode_spoils_nothing() -> None:
    here = Rank.of(
        ThreadWorld(1),
        0,
        shards=1,
        precision=Precision(compute=torch.float32, master=torch.float64),
    )
    with torch.inference_mode():
        here.gather()
        loss_of([m for _, m in here.named], *batch(0, torch.float32))
        for unit in here.units:
            unit.release()
    here.step(*batch(0))
    assert_same(here.reduced(), reference(), 1e-5)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_tensor_assigned_to_data_is_refused_and_changes_in_place_are_not(shards: int) -> None:
    """Regression: torch takes the assignment and changes nothing, so such a loop never trained."""

    def work(world: ThreadWorld, rank: int) -> None:
        here = Rank.of(world, rank, shards=shards)
        here.step(*batch(0))
        weight = here.units[0].parameters[0].sharded
        torch.optim.SGD([weight], lr=0.1).step()
        with torch.no_grad():
            weight.mul_(0.5)
        weight.data.mul_(2.0)
        weight.data.copy_(weight.data + 1.0)
        here.step(*batch(1))
        weight.data = weight.data - 0.1 * weight.grad
        with pytest.raises(RunError, match=r"was given another tensor through \.data.*in place"):
            here.units[0].gather()

    run_threads(shards, work)
