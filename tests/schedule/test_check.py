"""What ``check`` refuses, each once, and the sentence it says."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from terashard.errors import ScheduleError
from terashard.schedule.actions import Action, Cell, Grid, MicroBatch, UnitKey
from terashard.schedule.check import check
from terashard.schedule.compile import compile_schedule
from terashard.schedule.lower import (
    fuse_pairs,
    insert_sharding,
    insert_transfers,
    last_backward_cuts,
    split_at_units,
)
from terashard.schedule.orders import ORDERS, fill_drain, one_forward_one_backward
from terashard.schedule.schedule import Schedule, Unit
from terashard.schedule.text import parse_action
from tests.helpers.mutations import KINDS, mutate
from tests.helpers.schedules import stage_after_stage

UNITS = (
    (Unit("embed", ("shard", "replica", "tie")), Unit("layers.0", ("shard", "replica"))),
    (Unit("layers.1", ("shard", "replica")), Unit("head", ("shard", "replica", "tie"), head=True)),
)


def sharded(grid: Grid) -> Schedule:
    """1F1B with everything in it: cuts, transfers, gathers, all three sums."""
    bare = one_forward_one_backward(grid)
    cut = split_at_units(bare, last_backward_cuts(bare, UNITS))
    return insert_sharding(insert_transfers(cut), UNITS)


RIGHT = sharded(Grid.uniform(2, 2, 2))


def edited(rank: int, *edits: tuple[str, str], schedule: Schedule = RIGHT) -> Schedule:
    """``schedule`` with words of one rank's program replaced, each first one found."""
    text = " ".join(map(str, schedule.actions(rank)))
    for old, new in edits:
        assert f" {old} " in f" {text} ", f"{old} is not in {text}"
        text = f" {text} ".replace(f" {old} ", f" {new} ", 1).strip()
    programs: list[list[Action]] = list(schedule)
    programs[rank] = [parse_action(word) for word in text.split()]
    return schedule.with_actions(programs)


def refuses(schedule: Schedule, sentence: str, **how: str) -> None:
    with pytest.raises(ScheduleError) as refused:
        check(schedule, **how)
    assert sentence in str(refused.value)


def test_the_schedule_of_these_tests_is_right():
    check(RIGHT)
    check(fuse_pairs(RIGHT), sends="blocking")


@pytest.mark.parametrize(
    ("rank", "edits", "sentence"),
    [
        # 1. complete
        (0, [("F0.0.1", "")], "F0.0.1 is missing; every cell"),
        (0, [("B0.1.0/1", "")], "B0.1.0/1 is missing"),
        (1, [("A1:0@replica", "")], "A1:0@replica is missing"),
        (0, [("S0.0.1>1", "")], "S0.0.1>1 is missing"),
        (1, [("R1.0.1<0", "")], "R1.0.1<0 is missing"),
        (0, [("F0.0.1", "F0.0.1 F0.0.1")], "F0.0.1 is done 2 times"),
        (0, [("A0:0@shard", "A0:0@shard A0:0@shard")], "A0:0@shard is done 2 times"),
        (0, [("B0.0.0", "B0.0.0/1")], "B0.0.0/1 is in the schedule, but the grid has no such work"),
        (1, [("A1:0@shard", "A1:0@tie")], "A1:0@tie is in the schedule, but the grid has no such"),
        (0, [("S0.0.1>1", "S0.0.1>0")], "S0.0.1>0 is in the schedule, but the grid has no such"),
        (0, [("S0.0.1>1", "S0.0.1>2")], "S0.0.1>2 is in the schedule, but the grid has no such"),
        (1, [("R1.0.1<0", "R1.0.1<1")], "R1.0.1<1 is in the schedule, but the grid has no such"),
        (0, [("F0.0.1", "F0.0.2")], "F0.0.2 is of a cell or unit that this schedule does not have"),
        (0, [("F0.0.1", "F2.0.1")], "F2.0.1 is of a cell or unit that this schedule does not have"),
        (0, [("G0:0", "G0:5")], "G0:5 is of a cell or unit that this schedule does not have"),
        (0, [("F0.0.1", "F1.0.1")], "F1.0.1 is of stage 1, which is not on this rank"),
        (0, [("G0:0", "G1:0")], "G1:0 is of stage 1, which is not on this rank"),
        # 2. in order
        (
            0,
            [("F0.0.0", "@"), ("F0.0.1", "F0.0.0"), ("@", "F0.0.1")],
            "needs F0.0.0, which comes later",
        ),
        (
            1,
            [("B1.0.1", "@"), ("B1.0.0", "B1.0.1"), ("@", "B1.0.0")],
            "needs B1.0.1, which comes later",
        ),
        (
            1,
            [("F1.0.1", "@"), ("B1.0.1", "F1.0.1"), ("@", "B1.0.1")],
            "needs F1.0.1, which comes later",
        ),
        (0, [("F0.1.0 F0.1.0/1", "F0.1.0/1 F0.1.0")], "needs F0.1.0, which comes later"),
        (0, [("F0.0.0 S0.0.0>1", "S0.0.0>1 F0.0.0")], "S0.0.0>1 needs F0.0.0, which comes later"),
        (1, [("R1.0.0<0 F1.0.0", "F1.0.0 R1.0.0<0")], "F1.0.0 needs R1.0.0<0, which comes later"),
        # 3. resident
        (0, [("G0:1", "")], "F0.0.0 reads unit 0:1, which is not gathered then"),
        (
            1,
            [("X1:1", ""), ("F1.0.1", "X1:1 F1.0.1")],
            "reads unit 1:1, which is not gathered then",
        ),
        (0, [("G0:1", "G0:1 G0:1")], "G0:1 gathers a unit that is full already"),
        (0, [("X0:1", "X0:1 X0:1")], "X0:1 releases a unit that is not full"),
        (0, [("X0:1", "")], "rank 0: unit 0:1 is gathered but never released"),
        (0, [("X0:1", "X0:1 G0:1 X0:1")], "X0:1 releases a unit that nothing has read since"),
        (
            0,
            [("A0:1@shard", ""), ("B0.1.0/1", "A0:1@shard B0.1.0/1")],
            "B0.1.0/1 adds to the gradient of unit 0:1 after it was reduced",
        ),
        (
            1,
            [("A1:1@shard", ""), ("F1.1.1", "A1:1@shard F1.1.1")],
            "F1.1.1 adds to the gradient of unit 1:1 after it was reduced",
        ),
        (
            0,
            [("A0:0@shard A0:0@replica", "A0:0@replica A0:0@shard")],
            "A0:0@replica sums over replica before the sum over shard is done",
        ),
        (
            0,
            [("A0:0@tie", ""), ("A0:0@replica", "A0:0@tie A0:0@replica")],
            "A0:0@tie sums over tie before the sum over replica is done",
        ),
    ],
)
def test_a_fault_on_one_rank_is_refused_with_a_sentence(rank, edits, sentence):
    refuses(edited(rank, *edits), sentence)


def test_an_error_begins_with_rank_and_position():
    with pytest.raises(ScheduleError, match=r"^rank 0, position 1: F0\.0\.0 reads unit 0:1, which"):
        check(edited(0, ("G0:1", "")))


def test_an_empty_schedule_is_not_complete():
    refuses(RIGHT.with_actions([[], []]), "is missing")


@pytest.mark.parametrize(
    ("micros", "slices", "right", "wrong", "asked"),
    [
        (2, 1, "R1.0.0<0 F1.0.0 R1.1.0<0 F1.1.0", "R1.1.0<0 F1.1.0 R1.0.0<0 F1.0.0", "R1.1.0<0"),
        (1, 2, "R1.0.0<0 F1.0.0 R1.0.1<0 F1.0.1", "R1.0.1<0 R1.0.0<0 F1.0.0 F1.0.1", "R1.0.1<0"),
    ],
)
def test_a_channel_that_mixes_up_messages_is_refused(micros, slices, right, wrong, asked):
    """Rank 1 asks for the second message first; every other rule holds."""
    schedule = insert_transfers(fill_drain(Grid.uniform(2, micros, slices)))
    mixed = edited(1, (right, wrong), schedule=schedule)
    refuses(mixed, f"rank 0 sends S0.0.0>1 when rank 1 asks for {asked}: both ranks must name")


def test_a_channel_that_mixes_up_virtual_stages_is_refused():
    """Rank 1 asks for stage 3's input first, while rank 0 sends stage 1's first."""
    grid = Grid(ranks=2, partition=(MicroBatch(1, (1,)),) * 2, chunks=2)
    schedule = insert_transfers(stage_after_stage(grid))
    check(schedule)
    late = edited(
        0, ("S0.1.0>1", ""), ("F2.0.0 S2.0.0>3", "F2.0.0 S2.0.0>3 S0.1.0>1"), schedule=schedule
    )
    refuses(late, "rank 0 sends S2.0.0>3 when rank 1 asks for R1.1.0<0")


def test_ranks_that_wait_for_each_other_are_refused_whatever_sends_do():
    """Each rank wants a message before it gives its own."""
    grid = Grid(ranks=2, partition=(MicroBatch(1, (1,)),), chunks=2)
    schedule = insert_transfers(stage_after_stage(grid))
    circle = edited(
        1,
        ("R1.0.0<0 F1.0.0 S1.0.0>2", ""),
        ("R3.0.0<2 F3.0.0", "R3.0.0<2 R1.0.0<0 F1.0.0 S1.0.0>2 F3.0.0"),
        schedule=schedule,
    )
    circle = edited(0, ("S0.0.0>1", ""), ("S2.0.0>3", "S2.0.0>3 S0.0.0>1"), schedule=circle)
    refuses(circle, "rank 0, position 1: R2.0.0<1 waits for S1.0.0>2")
    refuses(circle, "rank 1, position 0: R3.0.0<2 waits for S2.0.0>3")


def test_a_pair_without_a_receive_from_the_same_rank_is_refused():
    schedule = insert_transfers(one_forward_one_backward(Grid.uniform(3, 2, 1)))
    sentence = "S1.0.0>{0}& is paired, but no receive from rank {0} follows; pair it with one"
    for peer in (0, 2):  # a receive from rank 2, from rank 0 follows
        paired = edited(1, (f"S1.0.0>{peer}", f"S1.0.0>{peer}&"), schedule=schedule)
        refuses(paired, sentence.format(peer))


@pytest.mark.parametrize(
    ("first", "middle", "last"),
    [("tie", "tie", "tie"), ("tie", "", ""), ("", "tie", "tie"), ("tie", "tie", "")],
)
def test_a_tie_is_between_the_first_and_the_last_stage(first, middle, last):
    units = tuple(
        (Unit("u", ("shard", "tie") if tie else ("shard",)),) for tie in (first, middle, last)
    )
    schedule = insert_sharding(insert_transfers(fill_drain(Grid.uniform(3, 1, 1))), units)
    refuses(schedule, "a tie is between one unit of the first and one of the last stage")


def test_a_tie_within_one_rank_or_of_two_units_is_refused():
    tied = (Unit("u", ("shard", "tie")),)
    alone = insert_sharding(fill_drain(Grid.uniform(1, 1, 1)), (tied,))
    refuses(alone, "units of stages [0] are tied")
    there_and_back = Grid(ranks=1, partition=(MicroBatch(1, (1,)),), chunks=2, placement="v")
    refuses(insert_sharding(stage_after_stage(there_and_back), (tied, tied)), "on two ranks")
    twice = insert_sharding(insert_transfers(fill_drain(Grid.uniform(2, 1, 1))), (tied * 2, tied))
    refuses(twice, "units of stages [0, 0, 1] are tied")


def test_gathers_of_units_that_nobody_listed_are_refused():
    programs = list(insert_transfers(fill_drain(Grid.uniform(1, 1, 1))))
    programs[0].insert(0, parse_action("G0:0"))
    refuses(RIGHT.of(Grid.uniform(1, 1, 1), programs), "G0:0 is of a cell or unit that this")


def test_negative_numbers_are_no_cells_and_no_units():
    for old, new in [
        ("F0.0.0", Cell(-1, 0, 0)),
        ("F0.0.1", Cell(0, 0, -1)),
        ("F0.0.1", Cell(0, -2, 0)),
    ]:
        programs = list(RIGHT)
        position = list(map(str, programs[0])).index(old)
        programs[0][position] = replace(programs[0][position], cell=new)
        refuses(RIGHT.with_actions(programs), "is of a cell or unit that this schedule does not")
    programs = list(RIGHT)
    extra = [replace(parse_action(word), unit=UnitKey(-1, 0)) for word in ("G0:0", "X0:0")]
    programs[1] = [*extra, *programs[1]]
    refuses(RIGHT.with_actions(programs), "is of a cell or unit that this schedule does not")


def test_parts_that_are_not_of_the_grid_are_refused_at_birth():
    grid = Grid.uniform(2, 1, 1)
    with pytest.raises(ScheduleError, match="programs for 1 ranks, but the grid has 2"):
        Schedule.of(grid, [[]])
    with pytest.raises(ScheduleError, match="units are listed for 1 stages, but the grid has 2"):
        Schedule.of(grid, [[], []], units=((Unit("u"),),))
    with pytest.raises(ScheduleError, match="stage 0 has a head among its units"):
        Schedule.of(grid, [[], []], units=((Unit("u", head=True),), (Unit("u"),)))
    for lender in ("v", "w"):  # itself, and a unit of another stage
        units = ((Unit("w"),), (Unit("u"), Unit("v", borrows=(lender,))))
        with pytest.raises(ScheduleError, match=f"v of stage 1 borrows from {lender}; .*: u$"):
            Schedule.of(grid, [[], []], units=units)
    for cell, cuts in [(Cell(2, 0, 0), (1,)), (Cell(0, 0, 1), (1,))]:
        with pytest.raises(ScheduleError, match="the grid has no such cell"):
            Schedule.of(grid, [[], []], cuts={cell: cuts})
    for bounds in [(), (0,), (-1,), (2,), (1, 1), (2, 1)]:
        units = ((Unit("a"), Unit("b")), (Unit("c"),))
        with pytest.raises(ScheduleError, match="cuts must rise, and leave at least one unit"):
            Schedule.of(grid, [[], []], units=units, cuts={Cell(0, 0, 0): bounds})


def test_a_unit_has_a_name_and_sums_in_order():
    with pytest.raises(ScheduleError, match="a name is one word without spaces"):
        Unit("two words")
    for sums in [("replica", "shard"), ("replica",), ("shard", "shard"), ("tie",), ("node",)]:
        with pytest.raises(ScheduleError, match="the order is shard, replica, tie, each at most"):
            Unit("u", sums)


def each_micro() -> Schedule:
    """1F1B on one rank, two micro-batches of two slices, every gradient summed after each."""
    embed = Unit("embed", ("shard", "replica"), each_micro=True)
    units = ((embed, Unit("head", head=True, each_micro=True)),)
    return insert_sharding(one_forward_one_backward(Grid.uniform(1, 2, 2)), units)


@pytest.mark.parametrize(
    ("edits", "sentence"),
    [
        ([("A0:0.0@shard", "")], "A0:0.0@shard is missing"),
        ([("A0:0.1@shard", "A0:0.1@shard A0:0.1@shard")], "A0:0.1@shard is done 2 times"),
        ([("A0:0.1@shard", "A0:0@shard")], "A0:0@shard is in the schedule, but the grid has no"),
        ([("A0:0.1@shard", "A0:0.2@shard")], "A0:0.2@shard is in the schedule, but the grid has"),
        (
            [("A0:0.0@shard", ""), ("B0.0.0", "A0:0.0@shard B0.0.0")],
            "B0.0.0 adds to the gradient of unit 0:0 after it was reduced",
        ),
        (
            [("A0:0.0@shard", ""), ("A0:0@replica", "A0:0@replica A0:0.0@shard")],
            "sums over replica before the sum over shard of micro-batch 0 is done",
        ),
    ],
)
def test_every_contribution_is_in_one_sum_of_the_micro_batches(edits, sentence):
    check(each_micro())
    refuses(edited(0, *edits, schedule=each_micro()), sentence)


def test_what_a_later_micro_batch_has_added_already_may_be_summed_with_an_earlier_one():
    # The head is fed by forward cells: those of the next micro-batch come before this one's sum.
    both = "A0:1.0@shard A0:1.1@shard"
    check(edited(0, ("A0:1.0@shard", ""), ("A0:1.1@shard", both), schedule=each_micro()))


BORROWED = (Unit("embed"), Unit("layer"), Unit("head", head=True, borrows=("embed",)))


@pytest.mark.parametrize(
    ("edits", "sentence"),
    [
        (
            [("F0.0.0", "F0.0.0 X0:0"), ("B0.0.0", "G0:0 B0.0.0")],
            "F0.0.0/1 reads unit 0:0, which is not gathered then",
        ),
        (
            [("A0:0@shard", ""), ("F0.0.0/1", "A0:0@shard F0.0.0/1")],
            "F0.0.0/1 adds to the gradient of unit 0:0 after it was reduced",
        ),
    ],
)
def test_a_head_with_the_embeddings_weight_keeps_it_full_and_open(edits, sentence):
    # A tied embedding on one stage was known to the runtime only: check passed lists that read its
    # weight after its release.
    bare = split_at_units(fill_drain(Grid.uniform(1, 1, 1)), {Cell(0, 0, 0): (1,)})
    right = insert_sharding(bare, (BORROWED,))
    check(right)
    refuses(edited(0, *edits, schedule=right), sentence)
    alone = (*BORROWED[:2], replace(BORROWED[2], borrows=()))
    if "reads" in sentence:  # without the loan nothing is wrong
        check(edited(0, *edits, schedule=insert_sharding(bare, (alone,))))


def test_the_compiler_refuses_what_check_refuses():
    # Two walks over the units used to disagree: the compiler's passed over a missing gather.
    with pytest.raises(ScheduleError, match="reads unit 0:1, which is not gathered then"):
        compile_schedule(edited(0, ("G0:1", "")))
    with pytest.raises(ScheduleError, match="sums over tie, which the unit's gradient does not go"):
        compile_schedule(edited(0, ("A0:1@replica", "A0:1@tie")))


def test_nobody_can_write_into_a_schedule():
    rows = RIGHT.programs[0].copy()
    mine = replace(RIGHT, programs=(rows, RIGHT.programs[1]))
    rows[:] = 0
    assert mine == RIGHT
    with pytest.raises(ValueError, match="read-only"):
        mine.programs[0][0, 0] = 1


@pytest.fixture(scope="module")
def valid() -> list[Schedule]:
    """Right schedules: both orders, mixed partitions, with and without sharding, pairs, cuts."""
    uniform, mixed = (
        Grid.uniform(2, 2, 2),
        Grid(ranks=2, partition=(MicroBatch(2, (2, 1, 1)), MicroBatch(1, (4,)))),
    )
    found = [sharded(uniform), fuse_pairs(sharded(uniform)), sharded(mixed)]
    for order in ORDERS.values():
        found += [insert_transfers(order(Grid.uniform(3, 2, 2))), order(Grid.uniform(1, 2, 3))]
        found.append(insert_sharding(insert_transfers(order(mixed)), UNITS))
    return found


def test_every_drop_duplicate_and_wrong_peer_is_refused_and_swaps_only_if_they_matter(valid):
    for schedule in valid:
        check(schedule)
    counts: Counter[tuple[str, bool]] = Counter()
    for seed in range(1500):
        kind, description, mutant = mutate(valid[seed % len(valid)], Random(seed))
        try:
            check(mutant)
            accepted = True
        except ScheduleError:
            accepted = False
        assert kind == "swap" or not accepted, f"seed {seed}: {description} was accepted"
        counts[kind, accepted] += 1
    for kind in KINDS:
        print(f"{kind}: {counts[kind, False]} refused, {counts[kind, True]} accepted")
        assert counts[kind, False] > 100
    assert counts["swap", True] > 20


def test_a_mutation_depends_on_its_seed_alone(valid):
    for kind in KINDS:
        first, again = (mutate(valid[0], Random(7), kind) for _ in range(2))
        assert (first.kind, first.description) == (kind, again.description)
        assert first.schedule == again.schedule != valid[0]
