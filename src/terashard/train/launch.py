"""Starts a run's workers on this machine through torch's launcher, or becomes one under torchrun.

The launcher passes Ctrl-C and SIGTERM on to the workers and waits for them to save; a second one
ends everything. A worker that fails ends the run: the launcher stops the others and says, in one
message, which rank failed of what and who was waiting for whom.

Before any worker starts, everything is checked that can be: what is wrong with a run file, with the
data or with the checkpoint costs a sentence and changes nothing.
"""

import logging
import math
import os
import signal
import sys
import time
import uuid
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from terashard.checkpoint.load import Checkpoint, find_latest
from terashard.config.schema import RunConfig
from terashard.config.write import dump
from terashard.errors import CheckpointError, ConfigError, RunError
from terashard.files import replace_text
from terashard.plan.plan import Plan
from terashard.spec.model import ModelSpec
from terashard.train import preflight
from terashard.train.directory import RunDirectory
from terashard.train.failure import advice, explain, own_message
from terashard.train.optimizer import check_optimizer
from terashard.train.preflight import require_work, threads_each
from terashard.train.samples import Samples
from terashard.train.state import Progress, require_match, require_same_samples
from terashard.train.stop import StopFlag, hold_back_signals
from terashard.train.worker import Place, leave
from terashard.train.worker import work as _work


def launch(config: RunConfig, processes: int | None = None) -> int:
    """Start a new run and wait for it; returns its exit code."""
    config, (_, plan) = _anywhere(config), check(config, processes)
    directory = RunDirectory(Path(config.run.directory))
    with directory.create():
        directory.describe(config, plan)
        return _launch(config, directory, plan.processes, resume=False)


def resume(path: Path, overrides: tuple[str, ...] = (), flag: StopFlag | None = None) -> int:
    """Go on with the run in ``path``, in the layout that its configuration and ``overrides`` state.

    Under torchrun this process is one of the ranks, and ``flag`` listens.
    """
    directory = RunDirectory(path)
    config = _anywhere(directory.config(overrides))
    config = replace(config, run=replace(config.run, directory=str(path)))
    plan = check_resume(config, directory)
    if flag is not None:
        alone = nullcontext() if Place.of_environment().rank else directory.hold()
        with alone:
            return _become_rank(config, directory, flag, resume=True)
    with directory.hold():
        replace_text(directory.request, dump(config))
        return _launch(config, directory, plan.processes, resume=True)


def work(config: RunConfig, flag: StopFlag) -> int:
    """Be the rank that torchrun started; rank 0 makes the run directory, the others wait for it."""
    if not config.run.directory:
        raise ConfigError(
            "under torchrun every rank must know where to write: give --run.directory"
        )
    config, (_, plan) = _anywhere(config), check(config)
    directory = RunDirectory(Path(config.run.directory))
    if Place.of_environment().rank:
        _wait_for(directory.path / "lock", config.run.timeout)
        return _become_rank(config, directory, flag, resume=False)
    with directory.create():
        directory.describe(config, plan)
        return _become_rank(config, directory, flag, resume=False)


def _anywhere(config: RunConfig) -> RunConfig:
    """``config`` with whole paths of its data: a resume may start in another folder."""
    train, validation = (
        str(Path(name).resolve()) if name else ""
        for name in (config.data.train, config.data.validation)
    )
    return replace(config, data=replace(config.data, train=train, validation=validation))


def check(config: RunConfig, processes: int | None = None) -> tuple[ModelSpec, Plan]:
    """Refuse a run that cannot be; returns what the model is and how it is cut."""
    spec, plan = preflight.check(config, processes)
    Samples.of(config).steps(config)
    check_optimizer(config.optimizer, spec)
    return spec, plan


def check_resume(config: RunConfig, directory: RunDirectory) -> Plan:
    """Refuse a resume that cannot be; returns how the run is cut from now on."""
    spec, plan = check(config)
    try:
        checkpoint = Checkpoint.open(find_latest(directory.checkpoints))
        step = Progress.of(checkpoint).step
    except CheckpointError as cause:
        raise ConfigError(f"{directory.path} cannot be resumed: {cause}") from cause
    samples = Samples.of(config)
    require_match(checkpoint, spec, config)
    require_same_samples(checkpoint, samples)
    require_work(step, samples.steps(config))
    return plan


def _launch(config: RunConfig, directory: RunDirectory, processes: int, *, resume: bool) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    directory.begin()
    print(f"run directory {directory.path}; starting {processes} processes", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_each(config.run, processes)))
    words = ["-m", "terashard.train", str(directory.path), *["--resume"] * resume]
    try:
        with hold_back_signals():
            _elastic(config, processes)(*words)
    except SignalException as stopped:
        return _after_signal(directory, stopped.sigval)
    except KeyboardInterrupt:
        return _after_signal(directory, signal.SIGINT)
    except ChildFailedError as failed:
        codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        found = explain(directory, codes)
        with suppress(RunError):  # the first cause matters more
            directory.write_status("failed", directory.last_step())
        raise found from failed
    return 0


def _elastic(config: RunConfig, processes: int) -> Any:
    """torch's launcher for ``processes`` workers on this machine."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in [*logging.root.manager.loggerDict]:
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # we say it ourselves
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
        shutdown_timeout=math.ceil(config.run.shutdown_timeout),
    )
    return elastic_launch(settings, sys.executable)


def _after_signal(directory: RunDirectory, number: int) -> int:
    """Exit code of a run that was told to stop: 0 if its workers saved (and said so)."""
    if directory.status().get("state") in ("finished", "stopped"):
        return 0
    print(f"stopped at once; {advice(directory)}", file=sys.stderr)
    return 128 + number


def _become_rank(
    config: RunConfig, directory: RunDirectory, flag: StopFlag, *, resume: bool
) -> int:
    """Be one rank to the end of this process; what it failed of goes to standard error as well."""
    place = Place.of_environment()
    if place.rank == 0:
        directory.begin()
    terminal = os.dup(2)
    code = _work(config, directory, flag, resume=resume)
    if code:
        os.dup2(terminal, 2)
        print(f"error: {own_message(directory, place.rank)}", file=sys.stderr)
    leave(code)
    return code


def _wait_for(file: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not file.exists():
        if time.monotonic() > deadline:
            raise RunError(
                f"rank 0 did not make {file.parent} within {timeout:g} s; is it on a file system"
                " that all ranks share?"
            )
        time.sleep(0.05)
