"""The needs of every action against the mathematics, written down a second time."""

from collections.abc import Iterator

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from terashard.schedule.actions import (
    Action,
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
    decode,
)
from terashard.schedule.check import expected
from terashard.schedule.compile import Program, compile_schedule
from terashard.schedule.lower import insert_transfers
from terashard.schedule.needs import (
    needs,
    reduction_of,
    reductions,
    reductions_before,
    transfers,
    units_fed,
    units_used,
)
from terashard.schedule.schedule import Schedule, Unit
from tests.helpers.schedules import (
    SAME_EVERY_TIME,
    grids,
    schedules,
    stage_after_stage,
    virtual_grids,
)


def mathematics(schedule: Schedule, action: Action) -> Iterator[Action]:
    """What ``action`` needs, read off the recursions of a causal pipeline."""
    match action:
        case Forward(cell, 0):
            yield from before_forward(schedule, cell)
        case Forward(cell, k):
            yield Forward(cell, k - 1)
        case Backward(cell, k) if k < schedule.segments(cell) - 1:
            yield Backward(cell, k + 1)
        case Backward(cell, k):
            yield Forward(cell, k)
            yield from before_backward(schedule, cell)
        case Send(cell, to):
            yield last_forward(schedule, cell) if to > cell.stage else Backward(cell, 0)
        case Receive(Cell(s, m, t), source):
            yield Send(Cell(source, m, t), s)


def before_forward(schedule: Schedule, cell: Cell) -> Iterator[Action]:
    s, m, t = cell.stage, cell.micro, cell.slice
    if t > 0:
        yield last_forward(schedule, Cell(s, m, t - 1))
    if s > 0 and same_rank(schedule, s, s - 1):
        yield last_forward(schedule, Cell(s - 1, m, t))
    elif s > 0:
        yield Receive(cell, s - 1)


def before_backward(schedule: Schedule, cell: Cell) -> Iterator[Action]:
    s, m, t = cell.stage, cell.micro, cell.slice
    if t < schedule.grid.num_slices[m] - 1:
        yield Backward(Cell(s, m, t + 1), 0)
    if s < schedule.grid.num_stages - 1 and same_rank(schedule, s, s + 1):
        yield Backward(Cell(s + 1, m, t), 0)
    elif s < schedule.grid.num_stages - 1:
        yield Receive(cell, s + 1)


def last_forward(schedule: Schedule, cell: Cell) -> Forward:
    return Forward(cell, schedule.segments(cell) - 1)


def same_rank(schedule: Schedule, stage: int, other: int) -> bool:
    return schedule.grid.rank_of(stage) == schedule.grid.rank_of(other)


def edges(program: Program) -> list[tuple[Action, Action]]:
    pairs = zip(program.action.tolist(), program.need.tolist(), strict=True)
    return [(program.at(action), program.at(need)) for action, need in pairs]


def of_table(pairs: list[tuple[Action, Action]]) -> list[tuple[Action, Action]]:
    """Edges that no parameter is part of."""
    about_units = Gather | Release | Reduce
    return [p for p in pairs if not isinstance(p[0], about_units) | isinstance(p[1], about_units)]


def agree(schedule: Schedule) -> None:
    actions = [decode(tuple(row)) for row in expected(schedule).tolist()]
    wanted = [(a, need) for a in actions for need in mathematics(schedule, a)]
    for action in actions:
        assert set(needs(schedule, action)) == set(mathematics(schedule, action))
    program = compile_schedule(schedule)
    assert program.missing == ()
    assert sorted(map(str, of_table(edges(program)))) == sorted(map(str, wanted))


@SAME_EVERY_TIME
@given(schedules())
def test_needs_and_compiled_edges_are_those_of_the_mathematics(schedule):
    agree(schedule)


@SAME_EVERY_TIME
@given(virtual_grids())
def test_virtual_stages_on_one_rank_need_each_other_without_transfers(grid):
    agree(insert_transfers(stage_after_stage(grid)))


@SAME_EVERY_TIME
@given(schedules())
def test_edges_of_parameters_follow_every_unit_through_the_program(schedule):
    program = compile_schedule(schedule)
    found = set(edges(program)) - set(of_table(edges(program)))
    wanted: set[tuple[Action, Action]] = set()
    for actions in schedule:
        for position, action in enumerate(actions):
            before = actions[:position]
            match action:
                case Forward(cell) | Backward(cell):
                    for index in units_used(schedule, action):
                        gathers = [a for a in before if a == Gather(UnitKey(cell.stage, index))]
                        wanted |= {(action, gather) for gather in gathers[-1:]}
                case Release(unit):
                    wanted |= {(action, a) for a in before if has(schedule, a, unit, units_used)}
                case Reduce(unit, over):
                    earlier = [a for a in before if isinstance(a, Reduce) and a.unit == unit]
                    since = before[before.index(earlier[-1]) :] if earlier else before
                    if over == "shard":
                        feeders = {a for a in since if has(schedule, a, unit, units_fed)}
                        wanted |= {(action, a) for a in feeders}
                        wanted |= {(action, a) for a in earlier[-1:]}
                    else:
                        first = schedule.units[unit.stage][unit.index].reductions
                        axis = first[first.index(over) - 1]
                        wanted |= {(action, a) for a in earlier if a.over == axis}
    assert found == wanted


def has(schedule: Schedule, action: Action, unit: UnitKey, units: object) -> bool:
    on_stage = isinstance(action, Forward | Backward) and action.cell.stage == unit.stage
    return on_stage and unit.index in units(schedule, action)


@SAME_EVERY_TIME
@given(grids, st.data())
def test_a_need_that_is_not_there_is_listed_as_missing(grid: Grid, data: st.DataObject):
    schedule = insert_transfers(stage_after_stage(grid))
    rank = data.draw(st.integers(0, grid.ranks - 1))
    programs = list(schedule)
    gone = programs[rank].pop(data.draw(st.integers(0, len(programs[rank]) - 1)))
    program = compile_schedule(schedule.with_actions(programs))
    wanted = {a for actions in programs for a in actions if gone in mathematics(schedule, a)}
    assert {program.at(position) for position, _ in program.missing} == wanted


def test_a_head_is_used_and_fed_by_forward_cells_only():
    units = ((Unit("embed"), Unit("layer"), Unit("head", head=True)),)
    cell, cuts = Cell(0, 0, 0), {Cell(0, 0, 0): (1,)}
    schedule = Schedule.of(Grid.uniform(1, 1, 2), [[]], units=units, cuts=cuts)
    whole = Cell(0, 0, 1)
    assert units_used(schedule, Forward(whole)) == (0, 1, 2)
    assert units_used(schedule, Backward(whole)) == (0, 1)
    assert units_fed(schedule, Forward(whole)) == (2,)
    assert units_fed(schedule, Backward(whole)) == (0, 1)
    assert units_used(schedule, Forward(cell, 0)) == (0,)
    assert units_used(schedule, Forward(cell, 1)) == (1, 2)
    assert units_used(schedule, Backward(cell, 1)) == (1,)


def test_a_head_uses_and_feeds_the_unit_that_it_borrows_from():
    # A tied embedding on one stage: its gradient is final only after the head's last forward.
    units = ((Unit("embed"), Unit("layer"), Unit("head", head=True, borrows=("embed",))),)
    cell, cuts = Cell(0, 0, 0), {Cell(0, 0, 0): (1,)}
    schedule = Schedule.of(Grid.uniform(1, 1, 2), [[]], units=units, cuts=cuts)
    assert units_used(schedule, Forward(cell, 1)) == (0, 1, 2)
    assert units_fed(schedule, Forward(cell, 1)) == units_fed(schedule, Forward(Cell(0, 0, 1)))
    assert units_fed(schedule, Forward(cell, 1)) == (0, 2)
    assert units_used(schedule, Backward(cell, 1)) == units_fed(schedule, Backward(cell, 1)) == (1,)
    evaluation = Schedule.of(Grid.uniform(1, 1, 2), [[]], units=units, training=False)
    assert units_used(evaluation, Forward(cell)) == (0, 1, 2)
    assert units_fed(evaluation, Forward(cell)) == ()


def test_a_body_unit_that_borrows_does_so_in_both_directions():
    units = ((Unit("a"), Unit("b"), Unit("c", borrows=("a",))),)
    cell, cuts = Cell(0, 0, 0), {Cell(0, 0, 0): (1, 2)}
    schedule = Schedule.of(Grid.uniform(1, 1, 1), [[]], units=units, cuts=cuts)
    assert units_fed(schedule, Forward(cell, 2)) == ()
    for action in (Forward(cell, 2), Backward(cell, 2)):
        assert units_used(schedule, action) == (0, 2)
    assert units_fed(schedule, Backward(cell, 2)) == (0, 2)


@SAME_EVERY_TIME
@given(virtual_grids())
def test_every_message_is_listed_with_both_its_sides_and_its_maker(grid):
    """By the table, and by ``Send.receive`` and ``Receive.send``: the same partners."""
    schedule = stage_after_stage(grid)
    columns = np.concatenate(schedule.programs)
    found = transfers(schedule, columns)
    actions = [decode(tuple(row)) for row in columns.tolist()]
    rows = (found.receives.tolist(), found.sends.tolist(), found.makers.tolist())
    wanted = {
        (position, need)
        for position, action in enumerate(actions)
        for need in mathematics(schedule, action)
        if isinstance(need, Receive)
    }
    assert {(w, decode(tuple(r))) for w, r in zip(found.wanted.tolist(), rows[0], strict=True)} == (
        wanted
    )
    for receive, send, maker in zip(*(map(decode, map(tuple, r)) for r in rows), strict=True):
        assert (receive.send(), send.receive()) == (send, receive)
        assert [maker] == list(mathematics(schedule, send))


def test_shards_are_summed_before_replicas_and_replicas_before_ties():
    units = (
        (Unit("embed", ("shard", "replica", "tie")), Unit("layer", ("shard",), each_micro=True)),
        (Unit("head", ("shard", "tie"), each_micro=True),),
    )
    schedule = Schedule.of(Grid.uniform(2, 2, 1), [[], []], units=units)
    written = [" ".join(map(str, reductions(schedule, UnitKey(*at)))) for at in UNITS_OF_ENDS]
    assert written == [
        "A0:0@shard A0:0@replica A0:0@tie",
        "A0:1.0@shard A0:1.1@shard",
        "A1:0.0@shard A1:0.1@shard A1:0@tie",
    ]
    tie = Reduce(UnitKey(1, 0), "tie")
    assert reductions_before(schedule, tie) == reductions(schedule, UnitKey(1, 0))[:2]
    assert reductions_before(schedule, Reduce(UnitKey(0, 1), "shard", 1)) == ()
    assert reduction_of(schedule, UnitKey(0, 0), Cell(0, 1, 0)) == Reduce(UnitKey(0, 0))
    assert reduction_of(schedule, UnitKey(0, 1), Cell(0, 1, 0)) == Reduce(UnitKey(0, 1), "shard", 1)


UNITS_OF_ENDS = [(0, 0), (0, 1), (1, 0)]
