"""When a worker stops before its time: it was asked to, its launcher is gone, or another rank is.

The first Ctrl-C, SIGTERM or SIGHUP asks for a stop after the step that is running (before step 1:
after step 1); the flag travels in the step's reduction, so all ranks stop after the same step and
save. A second one stops at once. Signals that come within a moment of the first are the same one,
told by the terminal and by the launcher.

Python runs signal handlers on the main thread, between two of its instructions; a rank that waits
in a transport would not notice for minutes. So signals wake a thread of their own. The same thread
sees the launcher or another rank of this machine disappear: transports notice most of that by
themselves, but a rank that waits for a third one, or for nobody, would stay behind.
"""

import faulthandler
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_SIGNAL_SECONDS = 1.5
GRACE_SECONDS = 5.0
"""How long a rank may take to fail by itself, with a message, after another is gone."""
START_SECONDS = 15.0
"""How long a rank that was told to stop may still take to start: until then, nothing is lost."""
LOOK_SECONDS = 0.5

AT_ONCE = 130
"""Exit code of a rank that was told twice to stop."""
LEFT_BEHIND = 75
"""Exit code of a rank that did not answer after another was gone."""

log = logging.getLogger("terashard")


@contextmanager
def hold_back_signals() -> Iterator[None]:
    """Start processes that get no signal before they ``listen``; one that comes waits for that.

    A process begins with the signals blocked that its maker's thread blocks. Here the main thread
    blocks them and another thread takes them for it, so this process hears them as ever.
    """
    over = threading.Event()
    threading.Thread(target=over.wait, name="signals", daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()


class StopFlag:
    """Whether this process was asked to stop, and who asks."""

    def __init__(self) -> None:
        self.asked = False
        self._begun = False
        self._first = 0.0
        self._notice: Callable[[], None] = lambda: None
        self._others: dict[int, int] = {}
        self._lost_since: float | None = None

    def listen(self) -> None:
        """Take over the signals; only from the main thread, and before torch is imported."""
        listens, rings = os.pipe()
        os.set_blocking(rings, False)
        signal.set_wakeup_fd(rings, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher held them back
        watch = threading.Thread(
            target=self._watch, args=(listens, os.getppid()), name="stop", daemon=True
        )
        watch.start()

    def begin(self, notice: Callable[[], None]) -> None:
        """The run has started; ``notice`` is called at the first signal, on another thread."""
        self._begun, self._notice = True, notice
        if self.asked:
            notice()

    def look_after(self, others: Mapping[int, int]) -> None:
        """End this process if one of the ``others`` ends: rank → process of the same launcher."""
        self._others = dict(others)

    def rest(self) -> None:
        """The run is complete: other ranks may end before this one."""
        self._others = {}

    def hear(self) -> None:
        """A signal came."""
        now = time.monotonic()
        if not self.asked:
            self.asked, self._first = True, now
            self._notice()
        elif now - self._first > SAME_SIGNAL_SECONDS:
            log.warning("told to stop a second time")
            os._exit(AT_ONCE)

    def _watch(self, listens: int, launcher: int) -> None:
        while True:
            if select.select([listens], [], [], LOOK_SECONDS)[0]:
                for number in os.read(listens, 64):
                    if number in SIGNALS:
                        self.hear()
            if self._starts_too_long():
                log.warning("told to stop while starting")
                os._exit(1)
            if os.getppid() != launcher:
                log.warning("the launcher is gone")
                os._exit(1)
            self._look_for_the_lost()

    def _starts_too_long(self) -> bool:
        """Whether another rank will perhaps never come, which this one waits for."""
        late = time.monotonic() - self._first > START_SECONDS
        return self.asked and not self._begun and late

    def _look_for_the_lost(self) -> None:
        lost = [rank for rank, process in self._others.items() if not _lives(process)]
        now = time.monotonic()
        if not lost:
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = now
            log.warning("rank %s is gone", ", ".join(map(str, lost)))
        elif now - self._lost_since > GRACE_SECONDS:
            log.critical("rank %d is gone, and this one was here:", lost[0])
            faulthandler.dump_traceback()  # into the log, where standard error goes
            os._exit(LEFT_BEHIND)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
