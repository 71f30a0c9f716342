"""Rules of ``check`` where no other rule would refuse the same fault.

On one rank nothing is sent, so a swapped order is wrong for its own reason alone.
"""

import pytest

from terashard.errors import ScheduleError
from terashard.schedule.actions import Action, Grid
from terashard.schedule.check import check
from terashard.schedule.lower import insert_transfers
from terashard.schedule.orders import fill_drain
from terashard.schedule.schedule import Schedule
from terashard.schedule.text import parse_action


def one_rank(text: str) -> Schedule:
    """One stage, one sequence, two slices."""
    return Schedule.of(Grid.uniform(1, 1, 2), [list(map(parse_action, text.split()))])


def test_the_schedule_of_these_tests_is_right() -> None:
    check(one_rank("F0.0.0 F0.0.1 B0.0.1 B0.0.0"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("F0.0.1 F0.0.0 B0.0.1 B0.0.0", "F0.0.1 needs F0.0.0, which comes later"),
        ("F0.0.0 F0.0.1 B0.0.0 B0.0.1", "B0.0.0 needs B0.0.1, which comes later"),
        ("F0.0.0 B0.0.1 F0.0.1 B0.0.0", "B0.0.1 needs F0.0.1, which comes later"),
    ],
    ids=["forward slices swapped", "backward slices swapped", "backward before its forward"],
)
def test_an_order_is_refused_for_its_own_reason(text: str, sentence: str) -> None:
    with pytest.raises(ScheduleError) as refused:
        check(one_rank(text))
    assert sentence in str(refused.value)


@pytest.mark.parametrize("word", ["F0.0.0", "F1.0.0", "B0.0.0", "B1.0.0", "S0.0.0>1", "R1.0.0<0"])
def test_an_action_on_another_rank_than_its_stage_is_refused(word: str) -> None:
    """Moved, not copied: all the work is still there, once."""
    programs: list[list[Action]] = list(insert_transfers(fill_drain(Grid.uniform(2, 1, 1))))
    action = parse_action(word)
    here = next(rank for rank, program in enumerate(programs) if action in program)
    programs[here].remove(action)
    programs[1 - here].append(action)
    with pytest.raises(ScheduleError, match=f"{word} is of stage {here}, which is not on this"):
        check(Schedule.of(Grid.uniform(2, 1, 1), programs))
