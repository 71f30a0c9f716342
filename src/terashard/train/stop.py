"""Stopping: a flag that signals set, and the end of a worker whose launcher is gone.

The first Ctrl-C or SIGTERM asks for a stop after the step that is running; the flag travels in the step's reduction, so
all ranks stop after the same step and save. A later signal stops at once. A terminal sends Ctrl-C to launcher and
workers, and the launcher passes it on: signals that come within a moment of the first are the same one.
"""

import os
import signal
import threading
import time
from types import FrameType

SAME_SIGNAL_SECONDS = 1.5
AT_ONCE = 130
"""Exit code of a run that was stopped twice."""


class StopFlag:
    """Whether this process was asked to stop, and the signals that ask."""

    def __init__(self) -> None:
        self.asked = False
        self._first = 0.0

    def listen(self) -> None:
        """Take over SIGINT and SIGTERM; only from the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked and now - self._first > SAME_SIGNAL_SECONDS:
            os._exit(AT_ONCE)
        if not self.asked:
            self.asked, self._first = True, now


def end_with_parent(interval: float = 0.5) -> None:
    """End this process soon after its parent ended, however that happened (even by ``kill -9``)."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(interval)
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
