import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terashard.errors import PlanError, ScheduleError
from terashard.schedule.actions import (
    KINDS,
    OVERS,
    Backward,
    Cell,
    Forward,
    Gather,
    Grid,
    MicroBatch,
    Receive,
    Reduce,
    Release,
    Send,
    UnitKey,
    decode,
    encode,
)
from terashard.schedule.text import parse_action
from tests.helpers.schedules import SAME_EVERY_TIME

numbers = st.integers(0, 300)
cells = st.builds(Cell, numbers, numbers, numbers)
units = st.builds(UnitKey, numbers, numbers)
actions = st.one_of(
    st.builds(Forward, cells, numbers),
    st.builds(Backward, cells, numbers),
    st.builds(Send, cells, numbers, st.booleans()),
    st.builds(Receive, cells, numbers),
    st.builds(Gather, units),
    st.builds(Release, units),
    st.builds(Reduce, units, st.sampled_from(OVERS)),
)


@SAME_EVERY_TIME
@given(actions)
def test_an_action_survives_numbers_and_text(action):
    row = encode(action)
    assert decode(row) == action
    assert KINDS[row[0]] is type(action)
    assert decode(tuple(np.array(row, np.int64).tolist())) == action
    assert parse_action(str(action)) == action


def test_actions_are_written_as_the_module_says():
    cell, unit = Cell(1, 0, 2), UnitKey(1, 3)
    written = [
        *(Forward(cell), Forward(cell, 1), Backward(cell), Send(cell, 2), Send(cell, 2, True)),
        *(Receive(cell, 0), Gather(unit), Release(unit), Reduce(unit, "replica")),
        Reduce(unit, "shard", 0),
    ]
    expected = "F1.0.2 F1.0.2/1 B1.0.2 S1.0.2>2 S1.0.2>2& R1.0.2<0 G1:3 X1:3 A1:3@replica"
    expected += " A1:3.0@shard"
    assert " ".join(map(str, written)) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "F", "F1.0", "F1.0.2>1", "F-1.0.2", "B1.0.2&", "S1.0.2", "S1.0.2<1", "R1.0.2>0"),
        *("R1.0.2<0&", "S1.0.2/1>2", "G1.0.2", "X1", "A1:3", "A1:3@rank", "G1:3@shard", "Q1.0.2"),
    ],
)
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError, match="is no action; actions look like"):
        parse_action(text)


def test_a_row_of_an_unknown_kind_is_refused():
    with pytest.raises(ScheduleError, match=r"\[7, 0, 0, 0, 0, -1\] is no action"):
        decode((7, 0, 0, 0, 0, -1))


def test_stages_are_placed_looped_or_down_and_back_up():
    partition = (MicroBatch(1, (1,)),)
    looped = Grid(ranks=3, partition=partition, chunks=2)
    there_and_back = Grid(ranks=3, partition=partition, chunks=2, placement="v")
    assert [looped.rank_of(s) for s in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [there_and_back.rank_of(s) for s in range(6)] == [0, 1, 2, 2, 1, 0]
    assert looped.stages_of(1) == (1, 4)
    assert there_and_back.stages_of(0) == (0, 5)


def test_a_grid_has_its_cells_and_no_others():
    grid = Grid(ranks=2, partition=(MicroBatch(1, (2, 2)), MicroBatch(2, (4,))))
    assert grid.cells(1) == (Cell(1, 0, 0), Cell(1, 0, 1), Cell(1, 1, 0))
    assert all(cell in grid for stage in range(2) for cell in grid.cells(stage))
    for outside in [(2, 0, 0), (-1, 0, 0), (0, 2, 0), (0, -1, 0), (0, 1, 1), (0, 0, -1)]:
        assert Cell(*outside) not in grid


def test_bounds_of_slices_tile_the_sequence():
    micro = MicroBatch(2, (3, 1, 4))
    assert [micro.bounds(t) for t in range(3)] == [(0, 3), (3, 4), (4, 8)]
    assert micro.tokens == 8


@pytest.mark.parametrize(("sequences", "slices"), [(0, (1,)), (1, ()), (1, (2, 0))])
def test_a_micro_batch_without_work_is_refused(sequences, slices):
    with pytest.raises(PlanError, match="has no work"):
        MicroBatch(sequences, slices)


def test_a_grid_without_work_is_refused():
    partition = (MicroBatch(1, (1,)),)
    for wrong in [{"ranks": 0}, {"chunks": 0}, {"partition": ()}]:
        with pytest.raises(PlanError, match="has no work"):
            Grid(**({"ranks": 1, "partition": partition} | wrong))
    with pytest.raises(PlanError, match="no placement 'w'; there are: looped, v"):
        Grid(ranks=1, partition=partition, placement="w")
