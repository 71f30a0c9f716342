"""The real command, with its workers, its signals and its ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from terashard.train.record import read_records

START_SECONDS = 60.0
"""How long workers may take to import torch and meet on a busy machine."""

SMALL = """
run = {threads = 1, device = "cpu", timeout = 30}
model = {hidden_size = 16, num_layers = 2, num_heads = 2, mlp_size = 32}
batch = {sequences = 4, tokens = 16}
parallel = {stages = 2, slices = 2}
train = {steps = 100000}
optimizer = {warmup = 2}
data = {held_out = 0.1}
checkpoint = {every = 5}
"""


class Command:
    """``terashard WORDS`` in ``folder``, in a process group of its own, as a terminal starts it."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        launcher: Sequence[str] = (sys.executable, "-m", "terashard"),
    ) -> None:
        self.folder = folder
        self._files = [(folder / name).open("w+") for name in ("out.txt", "err.txt")]
        self.process = subprocess.Popen(
            [*launcher, *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
            start_new_session=True,
            env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
        )
        self._seen: set[psutil.Process] = set()

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self.look_around(), self.process):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        for file in self._files:
            file.close()

    def look_around(self) -> set[psutil.Process]:
        """Every process that was ever seen below this command."""
        with suppress(psutil.NoSuchProcess):
            self._seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self._seen

    def workers(self) -> list[psutil.Process]:
        """The ranks' processes, in order of rank."""
        found = [p for p in self.look_around() if p.is_running() and "RANK" in p.environ()]
        return sorted(found, key=lambda process: int(process.environ()["RANK"]))

    def survivors(self, within: float) -> list[psutil.Process]:
        """Processes that this command started and that live on after ``within`` seconds."""
        _, alive = psutil.wait_procs([*self._seen], timeout=within)
        return list(alive)

    def until(self, ready: Callable[[], object], timeout: float = START_SECONDS) -> None:
        """Wait for ``ready()``; fails if the command ends before."""
        deadline = time.monotonic() + timeout
        while not ready():
            self.look_around()
            assert self.process.poll() is None, self.err()
            assert time.monotonic() < deadline, f"not within {timeout} s"
            time.sleep(0.05)
        self.look_around()

    def until_step(self, run: Path, step: int) -> None:
        """Wait until ``run`` has recorded ``step``."""
        self.until(lambda: any(r["step"] >= step for r in read_records(run / "metrics.jsonl")))

    def send(self, number: signal.Signals) -> None:
        """Signal the command alone."""
        self.process.send_signal(number)

    def press_ctrl_c(self) -> None:
        """Signal the whole foreground group, as a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, timeout: float = 30.0) -> int:
        """Exit code."""
        return self.process.wait(timeout)

    def out(self) -> str:
        """What it printed."""
        return (self.folder / "out.txt").read_text()

    def err(self) -> str:
        """What it printed on standard error."""
        return (self.folder / "err.txt").read_text()


def steps_of(run: Path) -> list[Any]:
    """The recorded steps of a run."""
    return [record["step"] for record in read_records(run / "metrics.jsonl")]
