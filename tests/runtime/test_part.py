"""What a rank reads off a schedule before anything runs."""

from hypothesis import given

from terashard.runtime.part import Part, Sent
from terashard.schedule.actions import Backward, Cell, Forward, Gather, Grid, Receive, Send, UnitKey
from terashard.schedule.lower import insert_sharding, insert_transfers
from terashard.schedule.needs import units_used
from terashard.schedule.orders import fill_drain, one_forward_one_backward
from terashard.schedule.schedule import Schedule, Unit
from tests.helpers.schedules import SAME_EVERY_TIME, schedules


def _said(part: Part) -> list[str]:
    """``receive: sends that it acknowledges``, in the order of the receives."""
    receives = [action for action in part.actions if isinstance(action, Receive)]
    return [
        f"{receive}: {' '.join(f'{cell}>{to}' for cell, to in part.acknowledged[receive])}".strip()
        for receive in receives
    ]


def test_a_message_acknowledges_what_the_other_rank_had_taken() -> None:
    schedule = insert_transfers(fill_drain(Grid.uniform(2, 1, 2)))
    assert _said(Part.of(schedule, 0)) == ["R0.0.1<1: 0.0.0>1 0.0.1>1", "R0.0.0<1:"]
    assert _said(Part.of(schedule, 1)) == ["R1.0.0<0:", "R1.0.1<0:"]


def test_gradients_are_acknowledged_by_the_activations_that_follow_them() -> None:
    schedule = insert_transfers(one_forward_one_backward(Grid.uniform(2, 4, 1)))
    assert _said(Part.of(schedule, 1)) == [
        "R1.0.0<0:",
        "R1.1.0<0:",
        "R1.2.0<0: 1.0.0>0",
        "R1.3.0<0: 1.1.0>0",
    ]


@SAME_EVERY_TIME
@given(schedules())
def test_what_is_acknowledged_was_sent_before_and_is_acknowledged_once(schedule: Schedule) -> None:
    for rank in range(schedule.grid.ranks):
        part = Part.of(schedule, rank)
        sent: set[Sent] = set()
        for action in part.actions:
            match action:
                case Send(cell, to):
                    sent.add((cell, to))
                case Receive():
                    for message in part.acknowledged[action]:
                        sent.remove(message)  # KeyError: not sent yet, or acknowledged before
                        _require_taken(schedule, message, action)
                case _:
                    pass


def _require_taken(schedule: Schedule, message: Sent, receive: Receive) -> None:
    """The rank that sent what ``receive`` gets had received ``message`` by then."""
    cell, to = message
    there = list(schedule.actions(schedule.grid.rank_of(receive.source)))
    place = there.index(Receive(Cell(to, cell.micro, cell.slice), cell.stage))
    answer = Cell(receive.source, receive.cell.micro, receive.cell.slice)
    assert place < there.index(Send(answer, receive.cell.stage))


@SAME_EVERY_TIME
@given(schedules())
def test_every_gathering_has_one_first_use_and_nothing_reads_before(schedule: Schedule) -> None:
    for rank in range(schedule.grid.ranks):
        part = Part.of(schedule, rank)
        ready: set[UnitKey] = set()
        for action, first in zip(part.actions, part.first_uses, strict=True):
            assert ready.isdisjoint(first)
            ready |= set(first)
            if isinstance(action, Gather):
                ready.discard(action.unit)
            if isinstance(action, Forward | Backward):
                used = units_used(schedule, action)
                assert ready >= {UnitKey(action.cell.stage, index) for index in used}
        gathered = [action.unit for action in part.actions if isinstance(action, Gather)]
        assert sorted(unit for first in part.first_uses for unit in first) == sorted(gathered)


def test_a_frozen_unit_gets_no_gradients() -> None:
    units = ((Unit("a"), Unit("b", reductions=())), (Unit("c"),))
    bare = insert_transfers(fill_drain(Grid.uniform(2, 1, 1)))
    part = Part.of(insert_sharding(bare, units), 0)
    assert part.trained == (UnitKey(0, 0),)
