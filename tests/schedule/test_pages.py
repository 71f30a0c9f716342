"""The pictures in the documentation are those that the product draws; the example runs."""

import runpy
from pathlib import Path

import pytest

from terashard.errors import ScheduleError
from terashard.plan.plan import Plan
from terashard.schedule.check import check
from terashard.schedule.draw import Scale, draw
from terashard.schedule.schedule import Unit
from terashard.schedule.text import parse

ROOT = Path(__file__).parents[2]
CELL, SCHEDULE = ((ROOT / f"docs/concepts/{page}.md").read_text() for page in ("cell", "schedule"))


@pytest.mark.parametrize("slices", [1, 4])
def test_the_page_of_cells_shows_a_sequence_whole_and_in_slices(slices):
    plan = Plan.uniform(stages=3, sequences=1, tokens=1024, slices=slices)
    assert f"```\n{draw(plan.schedule(), Scale(work=256, letters=3))}\n```" in CELL


def test_the_page_of_schedules_shows_one_forward_one_backward():
    plan = Plan.uniform(stages=3, sequences=2, tokens=1024, micro_batches=2, slices=4)
    assert f"{draw(plan.schedule())}\n```" in SCHEDULE


def test_the_page_of_schedules_lists_a_right_one():
    plan = Plan.uniform(stages=2, shards=2, sequences=1, tokens=1024, slices=2)
    units = [[Unit("embed"), Unit("layers.0")], [Unit("layers.1"), Unit("head", head=True)]]
    text = plan.schedule(units).text()
    assert text in SCHEDULE
    check(parse(text))


def test_the_page_of_schedules_quotes_the_refusal_of_blocking_sends():
    plan = Plan.uniform(stages=2, sequences=2, tokens=8, micro_batches=2, slices=4)
    bare = plan.schedule()
    with pytest.raises(ScheduleError) as refused:
        check(bare, sends="blocking")
    assert "with blocking sends this schedule never ends: rank 0, position" in str(refused.value)
    assert "S0.1.0>1 waits for R1.1.0<0" in str(refused.value)
    assert "S0.1.0>1 waits for R1.1.0<0" in SCHEDULE


def test_the_example_prints_both_pictures_and_the_list(capsys):
    runpy.run_path(str(ROOT / "examples/01_draw_a_schedule.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "12 steps; ranks compute 67% of the time: 2.0 times as fast." in printed
    assert "rank 1  ·  F0 F1 F2 F3" in printed
    assert max(map(len, printed.split("terashard schedule 1")[0].splitlines())) <= 80
    check(parse(printed[printed.index("terashard schedule 1") :]))
