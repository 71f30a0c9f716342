"""Starts a run's workers on this machine through torch's elastic launcher, or becomes one of them under torchrun.

The launcher passes Ctrl-C and SIGTERM on to the workers and waits for them to save; a second one ends everything. A
worker that dies ends the run: the launcher stops the others and says, in one message, which rank died of what and who was
waiting for whom.
"""

import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terashard.checkpoint.load import find_latest
from terashard.config.schema import RunConfig
from terashard.errors import CheckpointError, ConfigError, RunError
from terashard.train.directory import RunDirectory
from terashard.train.worker import Place, model_and_plan
from terashard.train.worker import work as _work


def launch(config: RunConfig, processes: int | None = None) -> int:
    """Start a new run and wait for it; returns its exit code."""
    _, plan = model_and_plan(config)
    directory = RunDirectory.create(Path(config.run.directory), config, plan)
    return _launch(config, directory, processes or plan.processes, resume=False)


def resume(path: Path, overrides: tuple[str, ...] = ()) -> int:
    """Go on with the run in ``path``, in the layout that its configuration and ``overrides`` state."""
    directory = RunDirectory(path)
    config = directory.config(overrides)
    _, plan = model_and_plan(config)
    if "RANK" in os.environ:
        return _work(config, directory, resume=True)
    directory.describe(config, plan)
    return _launch(config, directory, plan.processes, resume=True)


def work(config: RunConfig) -> int:
    """Be the rank that torchrun started; rank 0 makes the run directory, the others wait for it."""
    if not config.run.directory:
        raise ConfigError(
            "under torchrun every rank must know where to write: give --run.directory"
        )
    directory, place = RunDirectory(Path(config.run.directory)), Place.of_environment()
    if place.rank == 0:
        _, plan = model_and_plan(config)
        RunDirectory.create(directory.path, config, plan)
    _wait_for(directory.path / "plan.json", config.run.timeout)
    code = _work(config, directory, resume=False)
    for error in directory.errors() if code else ():
        if error["rank"] == place.rank:
            print(f"error: {error['message']}", file=sys.stderr)
    return code


def _launch(config: RunConfig, directory: RunDirectory, processes: int, *, resume: bool) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    directory.begin()
    _quiet()
    os.environ.setdefault("OMP_NUM_THREADS", str(config.run.threads or _threads(processes)))
    words = ["-m", "terashard.train.worker", str(directory.path), *["--resume"] * resume]
    try:
        _elastic(config, processes)(*words)
    except SignalException as stopped:
        return _after_signal(directory, stopped.sigval)
    except ChildFailedError as failed:
        raise RunError(_explain(directory, failed.failures)) from failed
    return 0


def _elastic(config: RunConfig, processes: int) -> Any:
    """torch's launcher for ``processes`` workers on this machine."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP",
        shutdown_timeout=int(config.run.shutdown_timeout),
    )
    return elastic_launch(settings, sys.executable)


def _after_signal(directory: RunDirectory, number: signal.Signals) -> int:
    """Exit code of a run that was told to stop: 0 if it saved and said so."""
    status = directory.status()
    if status:
        step, state = status["step"], status["state"]
        print(f"{state} after step {step}; {_advice(directory)}")
        return 0
    print(f"stopped at once; {_advice(directory)}", file=sys.stderr)
    return 128 + int(number)


def _explain(directory: RunDirectory, failures: Mapping[int, Any]) -> str:
    """One message: the rank that failed first and why, then who was waiting."""
    errors = directory.errors()
    killed = {
        rank: signal.Signals(-failure.exitcode).name
        for rank, failure in failures.items()
        if failure.exitcode < 0 and rank not in {e["rank"] for e in errors}
    }
    lines = [f"rank {rank} was killed by {name}" for rank, name in sorted(killed.items())]
    for error in errors[: 1 if errors and not errors[0]["secondary"] and not killed else 2]:
        lines.append(_line(error))
    if not lines:
        codes = {rank: failure.exitcode for rank, failure in sorted(failures.items())}
        lines.append(f"workers ended with exit codes {codes}")
    where = f"logs: {directory.path / 'logs'}"
    return "\n".join([*lines, where, _advice(directory)])


def _advice(directory: RunDirectory) -> str:
    """How to go on."""
    try:
        found = find_latest(directory.checkpoints)
    except CheckpointError:
        return "no checkpoint was written yet"
    return f"go on from {found.name} with: terashard resume {directory.path}"


def _line(error: Mapping[str, Any]) -> str:
    text = str(error["message"])
    kind = "" if error["secondary"] or "rank" in text[:5] else f"rank {error['rank']}: "
    return f"{kind}{text}"


def _wait_for(file: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not file.exists():
        if time.monotonic() > deadline:
            raise RunError(
                f"rank 0 did not make {file.parent} within {timeout:g} s; is it on a shared file system?"
            )
        time.sleep(0.05)


def _threads(processes: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // processes)


def _quiet() -> None:
    """torch's launcher logs every signal it passes on; we say it ourselves."""
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
