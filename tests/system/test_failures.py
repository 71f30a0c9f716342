"""Whatever ends a run: it ends soon, leaves no process, says why once, and loses nothing."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from terashard.checkpoint.load import Checkpoint, find_latest
from tests.system.commands import SMALL, Command, steps_of
from tests.train.runs import tokens

pytestmark = pytest.mark.processes

CALLBACKS = '''
import errno
import os
import signal
import time


def dies(trainer, record):
    """Rank 1 is killed when rank 0 can do nothing but wait for it."""
    if trainer.pipeline.mesh.rank == 1 and record.step == 12:
        os.kill(os.getpid(), signal.SIGKILL)


def fails(trainer, record):
    if trainer.pipeline.mesh.rank == 1 and record.step == 3:
        raise ValueError("no such luck")


def fills_the_disk(trainer, record):
    """From step 12 on, rank 1 finds the disk full."""
    if trainer.pipeline.mesh.rank == 1 and record.step == 12:
        from terashard.checkpoint import save

        def full(file, piece):
            raise OSError(errno.ENOSPC, "No space left on device")

        save._write_piece = full


def sleeps(trainer, record):
    if trainer.pipeline.mesh.rank == 1 and record.step == 7:
        time.sleep(600)


def leaves(trainer, record):
    if trainer.pipeline.mesh.rank == 1 and record.step == 7:
        raise SystemExit(0)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a run file, tokens and callbacks; runs go into ``run``."""
    tokens(tmp_path)
    (tmp_path / "run.toml").write_text(SMALL)
    (tmp_path / "called.py").write_text(CALLBACKS)
    return tmp_path


def start(folder: Path, *words: str) -> Command:
    return Command(
        folder, "train", "run.toml", "--data.train", "tokens", "--run.directory", "run", *words
    )


def require_intact(run: Path, step: int) -> None:
    """The last complete checkpoint is of ``step`` or later, and every bit of it can be read."""
    checkpoint = Checkpoint.open(find_latest(run / "checkpoints"))
    assert checkpoint.step >= step
    for name in checkpoint.names():
        checkpoint.read(name)


def test_a_killed_rank_ends_the_run_and_a_killed_launcher_ends_the_ranks(folder: Path) -> None:
    run = folder / "run"
    with start(folder, "--train.callbacks", "called:dies") as command:
        command.until_step(run, 12)
        killed = time.monotonic()
        assert command.wait() == 1
        assert time.monotonic() - killed < 30
        assert command.survivors(within=1) == []
        said = command.err().splitlines()
    assert said[0] == "error: rank 1 was killed by SIGKILL"
    assert said[1].startswith("rank 0 (replica 0, stage 0, shard 0), after step 12, position ")
    assert "of cell 0.0.1 from rank 1 (replica 0, stage 1, shard 0), failed: " in said[1]
    assert said[2:] == ["logs: run/logs", "go on from step-00000010 with: terashard resume run"]
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    require_intact(run, 10)
    with Command(folder, "resume", "run", "--train.callbacks") as command:
        command.until_step(run, 22)
        workers = command.workers()
        assert len(workers) == 2
        command.process.kill()
        command.process.wait()
        assert command.survivors(within=5) == []
    require_intact(run, 20)
    found = steps_of(run)
    assert found == list(range(1, found[-1] + 1))


def test_an_exception_in_one_rank_is_told_and_not_the_others_lost_connection(folder: Path) -> None:
    with start(folder, "--train.callbacks", "called:fails") as command:
        assert command.wait(60) == 1
        assert command.survivors(within=1) == []
        assert command.err().splitlines() == [
            "error: rank 1 (replica 0, stage 1, shard 0): callback called:fails failed after"
            " step 3: ValueError: no such luck",
            "logs: run/logs",
            "no checkpoint was written yet",
        ]
    log = (folder / "run" / "logs" / "rank-1.log").read_text()
    assert "Traceback" in log
    assert "no such luck" in log


def test_a_full_disk_ends_the_run_with_the_earlier_checkpoints_intact(folder: Path) -> None:
    with start(folder, "--train.callbacks", "called:fills_the_disk") as command:
        assert command.wait(60) == 1
        said = command.err().splitlines()
    assert said == [
        "error: rank 1 could not save: [Errno 28] No space left on device;"
        " earlier checkpoints are intact",
        "logs: run/logs",
        "go on from step-00000010 with: terashard resume run",
    ]
    require_intact(folder / "run", 10)
    left = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
    assert left == ["latest", "step-00000005", "step-00000010"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_at_any_moment_ends_the_run(rank: int, folder: Path) -> None:
    other = 1 - rank
    with start(folder) as command:
        command.until_step(folder / "run", 12)
        command.workers()[rank].kill()
        assert command.wait() == 1
        assert command.survivors(within=1) == []
        said = command.err().splitlines()
    assert said[0] == f"error: rank {rank} was killed by SIGKILL"
    assert said[1].startswith(f"rank {other} (replica 0, stage {other}, shard 0), after step ")
    require_intact(folder / "run", 10)


@pytest.mark.slow
def test_a_rank_that_hangs_is_found_by_the_time_out(folder: Path) -> None:
    with start(folder, "--train.callbacks", "called:sleeps", "--run.timeout", "5") as command:
        command.until_step(folder / "run", 7)
        began = time.monotonic()
        assert command.wait(40) == 1
        assert time.monotonic() - began < 30
        assert command.survivors(within=1) == []
        said = command.err().splitlines()
    assert said[0] == "error: rank 1 did not answer; the end of its log shows where it was"
    assert "which waits for the gradient of cell" in said[1]
    assert "rank 1 (replica 0, stage 1, shard 0)" in said[1]
    assert "in sleeps" in (folder / "run" / "logs" / "rank-1.log").read_text()


@pytest.mark.slow
def test_a_rank_that_leaves_ends_the_run(folder: Path) -> None:
    with start(folder, "--train.callbacks", "called:leaves") as command:
        assert command.wait(60) == 1
        assert command.err().startswith("error: rank 1: SystemExit: 0")


@pytest.mark.slow
def test_a_rank_killed_while_it_starts_ends_the_run_and_the_name_is_free_again(
    folder: Path,
) -> None:
    with start(folder) as command:
        command.until(lambda: len(command.workers()) == 2)
        time.sleep(1.0)
        command.workers()[1].kill()
        assert command.wait(40) == 1
        assert command.err().startswith("error: rank 1 was killed by SIGKILL")
        assert command.survivors(within=1) == []
    with start(folder, "--train.steps", "2") as command:
        assert command.wait(60) == 0, command.err()


@pytest.mark.slow
def test_under_torchrun_the_rank_that_failed_says_why(folder: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m")
    words = ("train", "run.toml", "--data.train", "tokens", "--run.directory", "run")
    callbacks = ("--train.callbacks", "called:fails")
    with Command(folder, "terashard", *words, *callbacks, launcher=torchrun) as command:
        assert command.wait(60) == 1
        assert "error: rank 1 (replica 0, stage 1, shard 0): callback called:fails" in command.err()


@pytest.mark.slow
def test_two_runs_do_not_write_into_one_directory(folder: Path) -> None:
    with start(folder) as command:
        command.until_step(folder / "run", 6)
        (folder / "other").mkdir()
        os.symlink(folder / "run", folder / "other" / "run")
        with Command(folder / "other", "resume", "run") as other:
            assert other.wait(30) == 2
            assert "the run in run is going on; wait for its end" in other.err()
        command.send(signal.SIGTERM)
        assert command.wait() == 0
