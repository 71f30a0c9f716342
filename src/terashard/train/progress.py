"""What a person sees while a run goes on: two live lines in a terminal, plain lines elsewhere.

Only rank 0 shows anything. A display never ends a run: where nobody can read any more (a closed
terminal, a pipe to ``head``), nothing is shown.
"""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from terashard.train.record import StepRecord
from terashard.units import show_seconds

MEMORY = 0.9
"""Weight of the past in smoothed numbers: they look back over about ten steps."""


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


class Pace:
    """Tokens per second and seconds per step, smoothed: each a ratio of two decaying sums.

    Tokens are counted over the steps alone, the time left over everything between them as well:
    evaluations and checkpoints.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before = clock()
        self._tokens = self._computing = 0.0
        self._steps = self._passing = 0.0

    def add(self, record: StepRecord) -> None:
        """A step was done just now."""
        now = self._clock()
        self._tokens = self._tokens * MEMORY + record.tokens
        self._computing = self._computing * MEMORY + record.seconds
        self._steps = self._steps * MEMORY + 1
        self._passing = self._passing * MEMORY + now - self._before
        self._before = now

    @property
    def tokens_per_second(self) -> float:
        """Over about the last ten steps."""
        return self._tokens / self._computing if self._computing else 0.0

    def left(self, steps: int) -> str:
        """How long ``steps`` more steps will take."""
        seconds = steps * self._passing / self._steps if self._steps else 0.0
        return f"{show_seconds(round(seconds))} left"


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
        self._pace = Pace()

    def start(self, step: int, steps: int) -> None:
        """Remember where the run starts."""
        self._first, self._steps, self._pace = step, steps, Pace()

    def show(self, record: StepRecord) -> None:
        """Print the first, every n-th and the last step."""
        self._pace.add(record)
        if record.step % self._every and record.step not in (self._first + 1, self._steps):
            return
        self.say(
            f"step {record.step}/{self._steps}  {describe(record)}"
            f"  {self._pace.tokens_per_second:,.0f} tokens/s"
            f"  {self._pace.left(self._steps - record.step)}"
        )

    def say(self, line: str) -> None:
        """Print it."""
        with suppress(OSError):
            print(line, flush=True)

    def stop(self) -> None:
        """Nothing is open."""


class Bar:
    """Two live lines: how far the run is, and what the last step said."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._pace = Pace()
        self._step = self._steps = 0
        self._record: StepRecord | None = None
        self._held_out: float | None = None

    def start(self, step: int, steps: int) -> None:
        """Open the two lines."""
        self._step, self._steps, self._pace = step, steps, Pace()
        with suppress(OSError):
            self._live.start()
            self._live.update(self._render(), refresh=True)

    def show(self, record: StepRecord) -> None:
        """Move the bar."""
        self._pace.add(record)
        self._step, self._record = record.step, record
        if record.held_out_loss is not None:
            self._held_out = record.held_out_loss
        with suppress(OSError):
            self._live.update(self._render(), refresh=True)

    def say(self, line: str) -> None:
        """Print above the two lines."""
        with suppress(OSError):
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Leave the two lines as they are."""
        with suppress(OSError):
            self._live.stop()

    def _render(self) -> Group:
        share = f"{self._step / max(self._steps, 1):.0%}"
        if self._record is not None:
            share += f", {self._pace.left(self._steps - self._step)}"
        first = Table.grid(expand=True, padding=(0, 1, 0, 0))
        first.add_column(no_wrap=True)
        first.add_column(ratio=1)
        first.add_column(no_wrap=True, justify="right")
        first.add_row(
            Text.assemble("step ", (f"{self._step}", "bold"), f"/{self._steps}"),
            ProgressBar(total=max(self._steps, 1), completed=self._step),
            share,
        )
        return Group(first, self._numbers())

    def _numbers(self) -> Text:
        if self._record is None:
            return Text("waiting for the first step", style="dim")
        parts = [describe(self._record), f"{self._pace.tokens_per_second:,.0f} tokens/s"]
        if self._held_out is not None:
            parts.append(f"held-out {self._held_out:.4f}")
        return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")


def display_for(rank: int, log_every: int) -> Display:
    """Live lines for rank 0 in a terminal, plain ones elsewhere, nothing for the other ranks."""
    if rank:
        return Silent()
    console = Console()
    return Bar(console) if console.is_terminal and sys.stdout.isatty() else Lines(log_every)


def describe(record: StepRecord) -> str:
    """Loss, gradient norm and learning rate, in columns of fixed width."""
    return f"loss {record.loss:6.4f}  grad norm {record.gradient_norm:5.2f}  lr {record.lr:.1e}"
