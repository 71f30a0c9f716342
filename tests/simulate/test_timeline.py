import json

import pytest

from terashard.errors import ScheduleError
from terashard.schedule.actions import Backward, Cell, Forward, Send
from terashard.simulate.timeline import Span, Timeline

LINE = Timeline(
    (
        Span(0, Forward(Cell(0, 0, 0)), 1.0, 2.0),
        Span(0, Send(Cell(0, 0, 0), 1), 2.0, 4.0),
        Span(1, Forward(Cell(1, 0, 0)), 2.0, 3.0),
        Span(1, Backward(Cell(1, 0, 0)), 3.0, 5.0),
    )
)


def test_a_timeline_is_as_long_as_from_its_first_start_to_its_last_end():
    assert LINE.seconds == 4.0
    assert Timeline(()).seconds == 0.0


def test_only_computing_is_busy():
    assert (LINE.busy(0), LINE.busy(1)) == (1.0, 3.0)
    assert LINE.idle_share() == pytest.approx(1 - 4 / 8)
    assert Timeline(()).idle_share() == 0.0


def test_a_timeline_survives_json():
    assert Timeline.from_json(json.loads(json.dumps(LINE.as_json()))) == LINE


def test_a_row_that_is_no_action_is_refused():
    with pytest.raises(ScheduleError, match="'Q0' is no action"):
        Timeline.from_json([[0, "Q0", 0.0, 1.0]])
