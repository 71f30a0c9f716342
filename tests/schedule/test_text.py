import pytest
from hypothesis import given

from terashard.errors import ScheduleError
from terashard.schedule.actions import Cell, Grid, MicroBatch
from terashard.schedule.lower import fuse_pairs, insert_sharding, insert_transfers, split_at_units
from terashard.schedule.orders import fill_drain, forward_only, one_forward_one_backward
from terashard.schedule.schedule import Unit
from terashard.schedule.text import parse
from tests.helpers.schedules import SAME_EVERY_TIME, schedules, stage_after_stage, virtual_grids

WRITTEN = """\
terashard schedule 1
ranks 2
chunks 1 looped
micro 1 [3, 1]
unit 0:0 embed shard replica
unit 0:1 layers.0 shard replica
unit 1:0 layers.1 shard replica
unit 1:1 head shard replica head
cut 0.0.0 1
rank 0: G0:0 G0:1 F0.0.0 F0.0.0/1 S0.0.0>1 F0.0.1 S0.0.1>1 R0.0.1<1 B0.0.1 R0.0.0<1 B0.0.0/1 X0:1 \
A0:1@shard A0:1@replica B0.0.0 X0:0 A0:0@shard A0:0@replica
rank 1: G1:0 G1:1 R1.0.0<0 F1.0.0 R1.0.1<0 F1.0.1 X1:1 A1:1@shard A1:1@replica B1.0.1 S1.0.1>0 \
B1.0.0 S1.0.0>0 X1:0 A1:0@shard A1:0@replica
"""


@SAME_EVERY_TIME
@given(schedules())
def test_a_schedule_survives_text(schedule):
    read = parse(schedule.text())
    assert read == schedule
    assert read.grid == schedule.grid
    assert read.units == schedule.units
    assert read.cuts == schedule.cuts
    assert list(read) == list(schedule)


@SAME_EVERY_TIME
@given(virtual_grids())
def test_a_schedule_of_virtual_stages_survives_text(grid):
    schedule = insert_transfers(stage_after_stage(grid))
    assert list(parse(schedule.text())) == list(schedule)
    assert parse(schedule.text()).grid == grid


def test_pairs_and_evaluation_survive_text():
    paired = fuse_pairs(insert_transfers(one_forward_one_backward(Grid.uniform(2, 2, 2))))
    assert "&" in paired.text()
    assert parse(paired.text()) == paired
    evaluation = insert_transfers(forward_only(Grid.uniform(2, 1, 2)))
    assert not parse(evaluation.text()).training


def test_the_text_is_what_the_module_says():
    grid = Grid(ranks=2, partition=(MicroBatch(1, (3, 1)),))
    units = (
        (Unit("embed", ("shard", "replica")), Unit("layers.0", ("shard", "replica"))),
        (
            Unit("layers.1", ("shard", "replica")),
            Unit("head", ("shard", "replica"), head=True),
        ),
    )
    cut = split_at_units(fill_drain(grid), {Cell(0, 0, 0): (1,)})
    assert insert_sharding(insert_transfers(cut), units).text() == WRITTEN


def test_a_loan_is_written_behind_the_head():
    lent = (
        Unit("embed"),
        Unit("norm", each_micro=True),
        Unit("head", head=True, borrows=("embed", "norm"), each_micro=True),
    )
    schedule = insert_sharding(fill_drain(Grid.uniform(1, 1, 1)), (lent,))
    assert "\nunit 0:1 norm shard each\n" in schedule.text()
    assert "\nunit 0:2 head shard each head borrows embed norm\n" in schedule.text()
    assert parse(schedule.text()).units == (lent,)


def test_empty_lines_and_comments_are_skipped():
    lines = WRITTEN.splitlines()
    commented = "\n\n".join([lines[0], "# two ranks", *lines[1:]])
    assert parse(commented) == parse(WRITTEN)


@pytest.mark.parametrize(
    ("old", "new", "line", "sentence"),
    [
        ("F0.0.0/1", "F0.0", 10, "'F0.0' is no action"),
        ("ranks 2", "ranks two", 2, "invalid literal"),
        ("ranks 2", "lanks 2", 2, "a line begins with ranks"),
        ("chunks 1 looped", "forward always", 3, "a line begins with ranks"),
        ("[3, 1]", "[3; 1]", 4, "a micro-batch looks like"),
        ("[3, 1]", "[3, 0]", 4, "has no work"),
        ("embed shard replica", "embed replica", 5, "the order is shard, replica, tie"),
        ("embed shard replica", "embed shards", 5, "is summed over shards"),
        ("unit 0:1", "unit 0:2", 6, "unit 0:1 must come first"),
        ("unit 1:0", "unit 2:0", 7, "there is no stage 2"),
        ("rank 0:", "rank 1:", 10, "the program of rank 0 must come first"),
        ("rank 1:", "rank 0:", 11, "the program of rank 1 must come first"),
        ("cut 0.0.0 1\n", "cut 0.0.0 1\ncut 0.0.0 1\n", 10, "has been cut before"),
    ],
)
def test_an_error_names_the_line(old, new, line, sentence):
    assert old in WRITTEN
    with pytest.raises(ScheduleError) as refused:
        parse(WRITTEN.replace(old, new, 1))
    assert str(refused.value).startswith(f"line {line} of the schedule (")
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (WRITTEN, "", "this is no schedule"),
        ("schedule 1", "schedule 2", "its first line must be 'terashard schedule 1'"),
        ("micro 1 [3, 1]\n", "", "is not complete: a grid of 2 ranks"),
        ("1 looped", "1 round", "there is no placement 'round'"),
        (WRITTEN[WRITTEN.index("rank 1") :], "", "programs for 1 ranks, but the grid has 2"),
        ("cut 0.0.0", "cut 0.0.7", "the grid has no such cell"),
        ("cut 0.0.0 1", "cut 0.0.0 2", r"cuts must rise, and leave at least one unit"),
        ("layers.1 shard replica", "layers.1 shard replica head", "stage 1 has a head among"),
    ],
)
def test_an_incomplete_text_is_refused(old, new, sentence):
    assert old in WRITTEN
    with pytest.raises(ScheduleError, match=sentence):
        parse(WRITTEN.replace(old, new, 1))


@pytest.mark.parametrize(
    "line",
    [
        "rank 0: F0.0.99999999999999999999",
        "rank 0: F99999999999999999999.0.0",
        "rank 0: F0.0.0/1234567890",
        "rank 0: S0.0.0>1234567890",
        "rank 0: G0:1234567890",
        "cut 0.0.0 1234567890",
        "micro 1234567890 [2]",
        "ranks 1234567890",
    ],
)
def test_numbers_that_no_machine_integer_holds_are_refused_by_line(line: str) -> None:
    """Regression: the first ended in an ``OverflowError``."""
    text = f"terashard schedule 1\nranks 1\nmicro 1 [2]\n{line}\n"
    with pytest.raises(ScheduleError, match=r"line 4 of the schedule .* have at most 9"):
        parse(text)
