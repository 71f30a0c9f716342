from collections.abc import Iterator

import pytest
from hypothesis import given

from terashard.errors import ScheduleError
from terashard.schedule.actions import Action, Backward, Forward, Grid, MicroBatch
from terashard.schedule.check import check
from terashard.schedule.draw import Scale, draw
from terashard.schedule.lower import fuse_pairs, insert_transfers
from terashard.schedule.orders import ORDERS, fill_drain, forward_only, one_forward_one_backward
from terashard.schedule.schedule import Schedule
from tests.helpers.schedules import SAME_EVERY_TIME, grids, uniform_grids

orders = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


def live_cells(program: list[Action]) -> Iterator[int]:
    """Forward cells that wait for their backward, after every action."""
    live = 0
    for action in program:
        live += isinstance(action, Forward) - isinstance(action, Backward)
        yield live


def lanes(schedule: Schedule, **scale: int) -> list[str]:
    """The drawn lanes, without the ranks' names and the step numbers."""
    return [line[8:] for line in str(draw(schedule, Scale(**scale))).splitlines()[1:]]


@orders
@SAME_EVERY_TIME
@given(grid=grids)
def test_every_order_is_right_on_every_partition(order, grid):
    check(insert_transfers(order(grid)))


@orders
@SAME_EVERY_TIME
@given(grid=uniform_grids)
def test_uniform_orders_end_with_blocking_sends_once_pairs_are_fused(order, grid):
    check(fuse_pairs(insert_transfers(order(grid))), sends="blocking")


@SAME_EVERY_TIME
@given(grid=grids)
def test_fill_drain_ends_with_blocking_sends_as_it_is(grid):
    check(insert_transfers(fill_drain(grid)), sends="blocking")


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("slices", [1, 4])
def test_naive_one_forward_one_backward_hangs_with_blocking_sends(ranks, slices):
    naive = insert_transfers(one_forward_one_backward(Grid.uniform(ranks, 4, slices)))
    check(naive, sends="buffered")
    # The last two ranks stand at sends to each other.
    clause = r"rank {0}, position \d+: S{0}\.\S+>{1} waits for R{1}\.\S+<{0}"
    with pytest.raises(ScheduleError, match="with blocking sends this schedule never ends") as hang:
        check(naive, sends="blocking")
    for rank, other in [(ranks - 2, ranks - 1), (ranks - 1, ranks - 2)]:
        assert hang.match(f".*{clause.format(rank, other)}")


@SAME_EVERY_TIME
@given(grid=uniform_grids)
def test_live_cells_of_one_forward_one_backward_are_as_few_as_published(grid):
    ranks, micros, slices = grid.ranks, grid.num_micros, grid.num_slices[0]
    for rank, program in enumerate(one_forward_one_backward(grid)):
        peak = max(live_cells(program))
        assert peak == min(slices * micros, slices + ranks - 1 - rank)


@SAME_EVERY_TIME
@given(grid=grids)
def test_fill_drain_keeps_every_cell_live(grid):
    for program in fill_drain(grid):
        assert max(live_cells(program)) == sum(grid.num_slices)


@orders
@pytest.mark.parametrize("backward", [1, 2])
@SAME_EVERY_TIME
@given(grid=uniform_grids)
def test_uniform_steps_take_the_published_time(order, backward, grid):
    """Idle over ideal is (p - 1)/(n·m)."""
    picture = draw(insert_transfers(order(grid)), Scale(backward=backward))
    work = grid.num_micros * grid.num_slices[0]
    assert picture.steps == (1 + backward) * (work + grid.ranks - 1)


def test_fill_drain_looks_like_this():
    schedule = insert_transfers(fill_drain(Grid.uniform(3, 1, 3)))
    assert lanes(schedule, letters=3) == [
        "F0 F1 F2 ·  ·  ·  ·  B2 B1 B0",
        "·  F0 F1 F2 ·  ·  B2 B1 B0 ·",
        "·  ·  F0 F1 F2 B2 B1 B0 ·  ·",
    ]


def test_one_forward_one_backward_looks_like_this():
    schedule = insert_transfers(one_forward_one_backward(Grid.uniform(2, 2, 2)))
    assert lanes(schedule) == [
        "F0.0 F0.1 F1.0 ·    B0.1 F1.1 B0.0 ·    B1.1 B1.0",
        "·    F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0 ·",
    ]


def test_a_later_longer_micro_batch_is_run_forward_in_time():
    """All slices of a sequence are run forward before its last one can run back."""
    grid = Grid(ranks=1, partition=(MicroBatch(1, (3,)), MicroBatch(1, (1, 1, 1))))
    (program,) = one_forward_one_backward(grid)
    text = " ".join(map(str, program))
    assert text == "F0.0.0 B0.0.0 F0.1.0 F0.1.1 F0.1.2 B0.1.2 B0.1.1 B0.1.0"


def test_evaluation_has_forward_cells_only():
    schedule = insert_transfers(forward_only(Grid.uniform(3, 2, 2)))
    check(schedule, sends="blocking")
    assert not any(isinstance(a, Backward) for program in schedule for a in program)


@pytest.mark.parametrize("order", [*ORDERS.values(), forward_only])
def test_orders_of_one_chunk_refuse_more(order):
    with pytest.raises(ScheduleError, match="has one chunk per rank, but the grid has 2"):
        order(Grid(ranks=2, partition=(MicroBatch(1, (1,)),), chunks=2))
