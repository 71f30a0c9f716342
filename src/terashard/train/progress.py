"""What a person sees while a run goes on: a bar in a terminal, plain lines anywhere else. Rank 0 only."""

import sys
import time
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from terashard.train.record import StepRecord
from terashard.units import show_seconds


class Display(Protocol):
    """Shows a run."""

    def start(self, step: int, steps: int) -> None:
        """The run goes on from ``step`` of ``steps``."""

    def show(self, record: StepRecord) -> None:
        """A step was done."""

    def say(self, line: str) -> None:
        """Something happened that is worth a line."""

    def stop(self) -> None:
        """The run is over."""


class Silent:
    """Shows nothing: every rank but the first."""

    def start(self, step: int, steps: int) -> None:
        """Nothing."""

    def show(self, record: StepRecord) -> None:
        """Nothing."""

    def say(self, line: str) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


class Lines:
    """One plain line every few steps, for files and pipes."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._first = self._steps = 0
        self._began = time.monotonic()

    def start(self, step: int, steps: int) -> None:
        """Remember where the run starts."""
        self._first, self._steps, self._began = step, steps, time.monotonic()

    def show(self, record: StepRecord) -> None:
        """Print the first, every n-th and the last step."""
        done = record.step - self._first
        if record.step % self._every and record.step != self._steps and done > 1:
            return
        left = (time.monotonic() - self._began) / done * (self._steps - record.step)
        print(
            f"step {record.step}/{self._steps}  {describe(record)}  left {show_seconds(left)}",
            flush=True,
        )

    def say(self, line: str) -> None:
        """Print it."""
        print(line, flush=True)

    def stop(self) -> None:
        """Nothing is open."""


class Bar:
    """A live bar in the terminal."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("step [bold]{task.completed}[/]/{task.total}"),
            BarColumn(bar_width=16),
            TaskProgressColumn(),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._task = self._progress.add_task("", total=None, numbers="")

    def start(self, step: int, steps: int) -> None:
        """Open the bar."""
        self._progress.update(self._task, completed=step, total=steps)
        self._progress.start()

    def show(self, record: StepRecord) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=record.step, numbers=describe(record))

    def say(self, line: str) -> None:
        """Print above the bar."""
        self._progress.console.print(line, highlight=False)

    def stop(self) -> None:
        """Leave the bar where it is."""
        self._progress.stop()


def display_for(rank: int, log_every: int) -> Display:
    """A bar for rank 0 in a terminal, lines for rank 0 elsewhere, nothing for the others."""
    if rank:
        return Silent()
    console = Console()
    return Bar(console) if console.is_terminal and sys.stdout.isatty() else Lines(log_every)


def describe(record: StepRecord) -> str:
    """Loss, gradient norm, learning rate and speed, in columns of fixed width."""
    parts: Sequence[str] = (
        f"loss {record.loss:6.4f}",
        f"gnorm {record.gradient_norm:5.2f}",
        f"lr {record.lr:.1e}",
        f"{record.tokens_per_second:,.0f} tok/s",
    )
    return "  ".join(parts)
