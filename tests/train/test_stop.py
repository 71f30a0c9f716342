"""Signals set a flag on a thread of their own; a rank that is left behind ends."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from terashard.train import stop
from terashard.train.stop import AT_ONCE, LEFT_BEHIND, StopFlag


class Exited(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", leave)


def test_the_first_signal_asks_and_tells_once(exits: None) -> None:
    flag, told = StopFlag(), []
    flag.begin(lambda: told.append(1))
    assert not flag.asked
    flag.hear()
    flag.hear()  # the same signal, told by terminal and launcher
    assert (flag.asked, told) == (True, [1])


def test_a_signal_before_the_run_begins_is_told_when_it_does(exits: None) -> None:
    flag, told = StopFlag(), []
    flag.hear()
    flag.begin(lambda: told.append(1))
    assert told == [1]


def test_a_second_signal_ends_at_once(exits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "SAME_SIGNAL_SECONDS", 0.0)
    flag = StopFlag()
    flag.hear()
    time.sleep(0.01)
    with pytest.raises(Exited, match=str(AT_ONCE)):
        flag.hear()


def run(code: str, number: signal.Signals | None = None) -> tuple[int, str]:
    """Exit code and output of ``code``, signalled as soon as it has said that it listens."""
    text = textwrap.dedent(code)
    opening = "import os, sys, time\nfrom terashard.train import stop\nflag = stop.StopFlag()\n"
    process = subprocess.Popen(
        [sys.executable, "-c", opening + text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    if number is not None:
        process.send_signal(number)
    said += process.stdout.read()
    process.stdout.close()
    return process.wait(), said.decode()


@pytest.mark.parametrize("number", stop.SIGNALS)
def test_a_signal_is_heard_while_the_main_thread_is_deep_in_foreign_code(
    number: signal.Signals,
) -> None:
    code = r"""
    import hashlib
    flag.begin(lambda: os.write(1, b"heard\n"))
    flag.listen()
    print("listening", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)  # no Python code runs for a second
    os.write(1, b"done\n")
    """
    assert run(code, number) == (0, "listening\nheard\ndone\n")


def test_a_process_ends_soon_after_its_launcher() -> None:
    code = """
    import subprocess
    child = "import time; from terashard.train.stop import StopFlag; f = StopFlag(); f.listen();"
    child += "print('up', flush=True); time.sleep(60)"
    made = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
    made.stdout.readline()
    print(made.pid, flush=True)
    os.kill(os.getpid(), 9)
    """
    _, said = run(code)  # to the end of whoever can still print
    assert said.endswith("the launcher is gone\n")


def test_a_rank_that_is_left_behind_shows_where_it_was_and_ends() -> None:
    code = """
    import subprocess
    stop.GRACE_SECONDS = 0.2
    gone = subprocess.Popen(["true"])
    gone.wait()
    flag.look_after({3: gone.pid})
    flag.listen()
    print("listening", flush=True)
    def stuck():
        time.sleep(60)
    stuck()
    """
    code_found, said = run(code)
    assert code_found == LEFT_BEHIND
    assert "in stuck" in said


def test_a_rank_whose_run_is_complete_may_outlive_the_others() -> None:
    code = """
    import subprocess
    stop.GRACE_SECONDS = 0.0
    gone = subprocess.Popen(["true"])
    gone.wait()
    flag.look_after({3: gone.pid})
    flag.rest()
    flag.listen()
    print("listening", flush=True)
    time.sleep(1.5)
    """
    assert run(code) == (0, "listening\n")


def test_a_rank_told_to_stop_that_never_starts_ends() -> None:
    code = """
    stop.START_SECONDS = 0.2
    flag.listen()
    print("listening", flush=True)
    time.sleep(60)
    """
    assert run(code, signal.SIGTERM)[0] == 1


def test_a_signal_before_a_process_listens_waits_until_it_does() -> None:
    code = """
    import subprocess
    child = "import time; print('up', flush=True); time.sleep(1);"
    child += "from terashard.train.stop import StopFlag; f = StopFlag(); f.listen();"
    child += "time.sleep(0.3); print(f.asked)"
    with stop.hold_back_signals():
        made = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
        made.stdout.readline()
        made.terminate()
        print(made.stdout.read().decode().strip())
    """
    assert run(code) == (0, "True\n")


def test_this_process_hears_signals_while_they_are_held_back_from_others() -> None:
    code = """
    import signal
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    with stop.hold_back_signals():
        print("listening", flush=True)
        for _ in range(100):
            time.sleep(0.05)
            if heard:
                break
    print(len(heard))
    """
    assert run(code, signal.SIGTERM) == (0, "listening\n1\n")
