from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from terashard.errors import ScheduleError
from terashard.schedule.actions import (
    Backward,
    Cell,
    Forward,
    Gather,
    Grid,
    Receive,
    Reduce,
    Release,
    Send,
    UnitKey,
)
from terashard.schedule.check import check
from terashard.schedule.lower import (
    fuse_pairs,
    insert_sharding,
    insert_transfers,
    last_backward_cuts,
    split_at_units,
)
from terashard.schedule.needs import needed
from terashard.schedule.orders import fill_drain, one_forward_one_backward
from terashard.schedule.schedule import Schedule, Unit
from terashard.schedule.text import parse
from tests.helpers.schedules import SAME_EVERY_TIME, schedules, stage_after_stage, virtual_grids

UNITS = (
    (Unit("embed", ("shard", "tie")), Unit("layers.0"), Unit("layers.1")),
    (Unit("layers.2"), Unit("layers.3"), Unit("head", ("shard", "tie"), head=True)),
)


def words(schedule: Schedule, rank: int) -> str:
    return " ".join(map(str, schedule.actions(rank)))


@SAME_EVERY_TIME
@given(schedules())
def test_lowered_schedules_are_right(schedule):
    check(schedule)


@SAME_EVERY_TIME
@given(virtual_grids())
def test_transfers_between_virtual_stages_are_right(grid):
    check(insert_transfers(stage_after_stage(grid)))


def test_receives_stand_before_and_sends_behind():
    schedule = insert_transfers(fill_drain(Grid.uniform(2, 1, 2)))
    assert words(schedule, 0) == ("F0.0.0 S0.0.0>1 F0.0.1 S0.0.1>1 R0.0.1<1 B0.0.1 R0.0.0<1 B0.0.0")
    assert words(schedule, 1) == ("R1.0.0<0 F1.0.0 R1.0.1<0 F1.0.1 B1.0.1 S1.0.1>0 B1.0.0 S1.0.0>0")


def test_transfers_are_read_off_whole_columns(monkeypatch):
    # The table was asked once for every cell: a second for eight ranks of 256 cells.
    asked: list[int] = []

    def counted(schedule, columns):
        asked.append(len(columns))
        return needed(schedule, columns)

    monkeypatch.setattr("terashard.schedule.needs.needed", counted)
    insert_transfers(fill_drain(Grid.uniform(4, 3, 3)))
    assert len(asked) == 3  # cells, receives, sends


def test_only_the_last_backward_cell_is_cut_and_never_at_the_head():
    bare = one_forward_one_backward(Grid.uniform(2, 2, 2))
    assert last_backward_cuts(bare, UNITS) == {Cell(0, 1, 0): (1, 2), Cell(1, 1, 0): (1,)}
    assert last_backward_cuts(fill_drain(Grid.uniform(2, 2, 2)), UNITS) == {
        Cell(0, 0, 0): (1, 2),
        Cell(1, 0, 0): (1,),
    }


def test_a_cut_cell_runs_its_segments_up_and_back_down():
    bare = split_at_units(fill_drain(Grid.uniform(1, 1, 2)), {Cell(0, 0, 1): (1, 2)})
    assert words(bare, 0) == "F0.0.0 F0.0.1 F0.0.1/1 F0.0.1/2 B0.0.1/2 B0.0.1/1 B0.0.1 B0.0.0"


def test_cutting_twice_is_refused():
    cut = split_at_units(fill_drain(Grid.uniform(1, 1, 1)), {Cell(0, 0, 0): (1,)})
    with pytest.raises(ScheduleError, match="cut into segments already; cut the schedule it was"):
        split_at_units(cut, {Cell(0, 0, 0): (1,)})


def test_units_are_gathered_once_and_reduced_as_soon_as_they_are_final():
    bare = fill_drain(Grid.uniform(2, 1, 1))
    cut = split_at_units(bare, last_backward_cuts(bare, UNITS))
    schedule = insert_sharding(insert_transfers(cut), UNITS)
    check(schedule)
    assert words(schedule, 1) == (
        "G1:0 G1:1 G1:2 R1.0.0<0 F1.0.0 F1.0.0/1 X1:2 A1:2@shard"
        " B1.0.0/1 X1:1 A1:1@shard B1.0.0 S1.0.0>0 X1:0 A1:0@shard A1:2@tie"
    )
    assert words(schedule, 0) == (
        "G0:0 G0:1 G0:2 F0.0.0 F0.0.0/1 F0.0.0/2 S0.0.0>1 R0.0.0<1"
        " B0.0.0/2 X0:2 A0:2@shard B0.0.0/1 X0:1 A0:1@shard B0.0.0 X0:0 A0:0@shard A0:0@tie"
    )


def test_sums_of_every_micro_batch_come_where_its_gradients_are_final():
    units = tuple(tuple(replace(unit, each_micro=True) for unit in stage) for stage in UNITS)
    bare = fill_drain(Grid.uniform(2, 2, 1))
    assert last_backward_cuts(bare, units) == {
        Cell(stage, micro, 0): (1, 2)[: 2 - stage] for stage in (0, 1) for micro in (0, 1)
    }
    schedule = insert_sharding(
        insert_transfers(split_at_units(bare, last_backward_cuts(bare, units))), units
    )
    check(schedule)
    assert words(schedule, 1) == (
        "G1:0 G1:1 G1:2 R1.0.0<0 F1.0.0 F1.0.0/1 A1:2.0@shard R1.1.0<0 F1.1.0 F1.1.0/1 X1:2"
        " A1:2.1@shard B1.1.0/1 A1:1.1@shard B1.1.0 S1.1.0>0 A1:0.1@shard"
        " B1.0.0/1 X1:1 A1:1.0@shard B1.0.0 S1.0.0>0 X1:0 A1:0.0@shard A1:2@tie"
    )
    assert parse(schedule.text()) == schedule


@SAME_EVERY_TIME
@given(schedules())
def test_every_unit_is_gathered_and_released_once_and_no_send_waits_behind_it(schedule):
    for rank, actions in enumerate(schedule):
        units = [
            UnitKey(s, i)
            for s in schedule.grid.stages_of(rank)
            for i in range(len(schedule.units[s]))
        ]
        assert sorted(a.unit for a in actions if isinstance(a, Gather)) == units
        assert sorted(a.unit for a in actions if isinstance(a, Release)) == units
        for before, send in pairwise(actions):
            if isinstance(send, Send):
                assert isinstance(before, Forward | Backward)


def test_without_backward_cells_nothing_is_reduced():
    bare = Schedule.of(Grid.uniform(1, 1, 1), [[Forward(Cell(0, 0, 0))]], training=False)
    schedule = insert_sharding(bare, ((Unit("layer"), Unit("head", head=True)),))
    check(schedule)
    assert words(schedule, 0) == "G0:0 G0:1 F0.0.0 X0:0 X0:1"
    assert not any(isinstance(a, Reduce) for a in schedule.actions(0))


def test_sends_are_paired_with_receives_from_the_same_rank_only():
    schedule = fuse_pairs(insert_transfers(one_forward_one_backward(Grid.uniform(3, 2, 1))))
    for program in schedule:
        for action, following in zip(program, [*program[1:], None], strict=True):
            if isinstance(action, Send):
                swaps = isinstance(following, Receive) and following.source == action.to
                assert action.paired == swaps
    assert words(schedule, 1) == (
        "R1.0.0<0 F1.0.0 S1.0.0>2 R1.1.0<0 F1.1.0 S1.1.0>2& R1.0.0<2"
        " B1.0.0 S1.0.0>0 R1.1.0<2 B1.1.0 S1.1.0>0"
    )
