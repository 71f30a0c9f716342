"""What is shown: smoothed numbers, plain lines in a pipe, two lines that fit a terminal."""

import io
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from terashard.train.progress import Bar, Lines, Pace, Silent, display_for
from terashard.train.record import StepRecord


def record(step: int, seconds: float = 0.5) -> StepRecord:
    return StepRecord(
        step=step,
        loss=3.21456,
        gradient_norm=0.918,
        lr=2.9e-4,
        tokens=1000,
        tokens_total=1000 * step,
        epoch=0,
        seconds=seconds,
        tokens_per_second=1000 / seconds,
        idle_share=0.1,
    )


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_steady_run_has_its_own_speed_from_the_first_step_on() -> None:
    clock = Clock()
    pace = Pace(clock)
    for step in range(1, 20):
        clock.now += 0.75
        pace.add(record(step))
        assert pace.tokens_per_second == pytest.approx(2000)
        assert pace.left(40) == "30 s left"


def test_one_slow_step_moves_the_speed_little_and_is_forgotten() -> None:
    clock = Clock()
    pace = Pace(clock)
    for step in range(1, 101):
        clock.now += 0.5
        pace.add(record(step, seconds=5.0 if step == 30 else 0.5))
        if step == 30:
            assert 1000 < pace.tokens_per_second < 1500  # of that step alone: 200
    assert pace.tokens_per_second == pytest.approx(2000, rel=1e-2)


def test_evaluations_and_checkpoints_count_for_the_time_left() -> None:
    clock = Clock()
    pace = Pace(clock)
    for step in range(1, 200):
        clock.now += 0.5 + 1.0
        pace.add(record(step))
    assert pace.tokens_per_second == pytest.approx(2000)
    assert pace.left(60) == "1:30 left"


def test_lines_show_the_first_every_tenth_and_the_last_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = Lines(every=10)
    lines.start(3, 25)
    for step in range(4, 26):
        lines.show(record(step))
    lines.say("step 25: held-out loss 3.3012")
    lines.stop()
    said = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in said] == [
        "step 4/25",
        "step 10/25",
        "step 20/25",
        "step 25/25",
        "step 25: held-out loss 3.3012",
    ]
    assert "loss 3.2146  grad norm  0.92  lr 2.9e-04  2,000 tokens/s" in said[0]
    assert said[3].endswith("0 s left")


def shown(width: int) -> list[str]:
    """The lines of a bar at step 120 of 1000, without colours."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    bar = Bar(console)
    bar.start(0, 1000)
    bar.show(replace(record(120), held_out_loss=3.3012))
    bar.stop()
    with console.capture() as capture:
        console.print(bar._render())
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [200, 100, 80, 60, 40])
def test_the_bar_fits_the_terminal(width: int) -> None:
    first, second = shown(width)
    assert max(len(first), len(second)) <= width
    assert first.startswith("step 120/1000 ━")
    assert first.rstrip().endswith("left")
    assert "12%" in first
    assert second.startswith("loss 3.2146  grad norm  0.92")


def test_all_numbers_fit_into_eighty_columns() -> None:
    assert shown(80)[1] == (
        "loss 3.2146  grad norm  0.92  lr 2.9e-04  2,000 tokens/s  held-out 3.3012"
    )


def test_text_that_looks_like_markup_is_printed_as_it_is() -> None:
    file = io.StringIO()
    bar = Bar(Console(file=file, width=40))
    bar.say("[bold] " + "x" * 60)
    assert file.getvalue() == "[bold] " + "x" * 60 + "\n"


class Closed(io.StringIO):
    """A terminal that is gone."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_a_terminal_that_is_gone_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Closed())
    for display in (Lines(1), Bar(Console(file=Closed(), force_terminal=True))):
        display.start(0, 5)
        display.show(record(1))
        display.say("hello")
        display.stop()


def test_only_the_first_rank_shows_and_a_pipe_gets_lines() -> None:
    assert isinstance(display_for(1, 10), Silent)
    assert isinstance(display_for(0, 10), Lines)
