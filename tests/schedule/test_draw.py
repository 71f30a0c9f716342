import re
from io import StringIO
from itertools import pairwise

import pytest
from hypothesis import given
from rich.console import Console

from terashard.errors import ScheduleError
from terashard.schedule.actions import Cell, Grid, MicroBatch
from terashard.schedule.draw import Scale, draw
from terashard.schedule.lower import insert_transfers, split_at_units
from terashard.schedule.orders import fill_drain, one_forward_one_backward
from tests.helpers.schedules import SAME_EVERY_TIME, schedules, stage_after_stage

FULL = insert_transfers(one_forward_one_backward(Grid.uniform(4, 2, 4)))


def drawn(schedule, **scale):
    return str(draw(schedule, Scale(**scale))).splitlines()


def test_four_ranks_and_eight_cells_fit_into_a_hundred_letters():
    picture = """
step    0                   5                   10                  15                  20
rank 0  F00 F01 F02 F03 F10 F11 F12 ·   ·   ·   B03 F13 B02 ·   B01 ·   B00 ·   B13 B12 B11 B10
rank 1  ·   F00 F01 F02 F03 F10 F11 ·   ·   B03 F12 B02 F13 B01 ·   B00 ·   B13 B12 B11 B10 ·
rank 2  ·   ·   F00 F01 F02 F03 F10 ·   B03 F11 B02 F12 B01 F13 B00 ·   B13 B12 B11 B10 ·   ·
rank 3  ·   ·   ·   F00 F01 F02 F03 B03 F10 B02 F11 B01 F12 B00 F13 B13 B12 B11 B10 ·   ·   ·
"""
    assert drawn(FULL, width=100) == picture.strip().splitlines()


def test_labels_are_as_clear_as_the_width_allows():
    assert "F0.0 F0.1" in drawn(FULL, width=120)[1]
    assert "F00 F01" in drawn(FULL, width=100)[1]
    one = insert_transfers(fill_drain(Grid.uniform(2, 1, 3)))
    assert "F0.0 F0.1 F0.2" in drawn(one)[1]
    assert "F0 F1 F2" in drawn(one, width=35)[1]


def test_what_is_too_wide_is_cut_off_and_says_so():
    lines = drawn(FULL, width=50)
    assert max(map(len, lines)) <= 50
    assert lines[1] == "rank 0  F00 F01 F02 F03 F10 F11 F12 ·   ·   ·"
    assert lines[-1] == "… 10 of 22 steps; a wider one (--width) shows more"


def test_a_backward_of_two_steps_is_twice_as_wide():
    schedule = insert_transfers(fill_drain(Grid.uniform(2, 1, 2)))
    assert drawn(schedule, backward=2, letters=5)[1:] == [
        "rank 0  F0.0 F0.1 ·    ·    ·    B0.1───── B0.0─────",
        "rank 1  ·    F0.0 F0.1 B0.1───── B0.0───── ·    ·",
    ]


def test_boxes_are_as_long_as_their_work():
    partition = (MicroBatch(2, (2, 1)), MicroBatch(1, (3,)))
    picture = draw(insert_transfers(fill_drain(Grid(ranks=1, partition=partition))))
    boxes = [(str(box.cell), box.start, box.end) for box in picture.lanes[0] if box.forward]
    assert boxes == [("0.0.0", 0, 2), ("0.0.1", 2, 3), ("0.1.0", 3, 4.5)]
    assert picture.steps == 9
    assert picture.busy == 1


def test_segments_of_one_cell_are_one_box():
    grid = Grid.uniform(2, 1, 2)
    cut = split_at_units(fill_drain(grid), {Cell(0, 0, 0): (1, 2), Cell(1, 0, 1): (1,)})
    assert drawn(insert_transfers(cut)) == drawn(insert_transfers(fill_drain(grid)))


def test_virtual_stages_are_named():
    partition = (MicroBatch(1, (1, 1)),)
    schedule = insert_transfers(stage_after_stage(Grid(ranks=2, partition=partition, chunks=2)))
    assert drawn(schedule)[1].startswith("rank 0  F0.0.0 F0.0.1 F2.0.0")


def test_a_token_pipeline_beside_the_whole_sequence():
    whole = draw(insert_transfers(fill_drain(Grid.uniform(3, 1, 1, 4))), Scale(work=1, letters=3))
    sliced = draw(insert_transfers(fill_drain(Grid.uniform(3, 1, 4, 1))), Scale(work=1, letters=3))
    assert (whole.steps, sliced.steps) == (24, 12)
    assert (whole.busy, sliced.busy) == pytest.approx((1 / 3, 2 / 3))
    assert str(whole).splitlines()[2] == (
        "rank 1  ·  ·  ·  ·  F0───────── ·  ·  ·  ·  ·  ·  ·  ·  B0───────── ·  ·  ·  ·"
    )


def test_only_a_right_schedule_is_drawn():
    with pytest.raises(ScheduleError, match="is missing"):
        draw(fill_drain(Grid.uniform(2, 1, 1)))


@SAME_EVERY_TIME
@given(schedules())
def test_cells_of_a_rank_do_not_overlap_and_none_is_lost(schedule):
    picture = draw(schedule)
    for rank, lane in enumerate(picture.lanes):
        assert all(a.end <= b.start for a, b in pairwise(lane))
        assert {box.cell for box in lane if box.forward} == set(schedule.grid.cells(rank))
        assert {box.cell for box in lane if not box.forward} == set(schedule.grid.cells(rank))
    widest = max(len(line) for line in str(picture).splitlines())
    assert widest <= 100


def test_rich_prints_the_same_letters_in_colour():
    picture = draw(FULL)
    screen = StringIO()
    console = Console(file=screen, width=100, color_system="truecolor", force_terminal=True)
    console.print(picture)
    plain = re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())
    assert plain != screen.getvalue()
    assert [line.rstrip() for line in plain.splitlines()] == str(picture).splitlines()
