"""``terashard train``: checks a run without torch, then starts its workers or becomes one."""

import os
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import tyro

from terashard.cli.arguments import RunFile
from terashard.config.schema import RunConfig
from terashard.errors import ConfigError
from terashard.train.directory import RunDirectory
from terashard.train.preflight import check
from terashard.train.stop import StopFlag


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(RunFile):
    """Train what a run file describes.

    Starts one worker for every rank on this machine; under torchrun, becomes the one of its rank.
    """

    processes: Annotated[
        int | None, tyro.conf.arg(aliases=["-n"], metavar="N", help_behavior_hint="")
    ] = None
    """Workers to start; by default replicas x stages x shards."""


def run(arguments: Train) -> int:
    """Check the run, then train; returns the exit code of the run."""
    config = arguments.load("train")
    check(config, arguments.processes)
    if under_torchrun():
        flag = listening()
        from terashard.train.launch import work

        return work(config, flag)
    config = named(config, arguments.file, arguments.preset)
    from terashard.train.launch import launch

    return launch(config, arguments.processes)


def named(config: RunConfig, file: Path | None, preset: str | None) -> RunConfig:
    """``config`` with a run directory that does not exist yet."""
    directory = config.run.directory
    if not directory:
        stem = file.stem if file is not None else preset
        directory = f"runs/{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    RunDirectory(Path(directory)).require_new()
    return replace(config, run=replace(config.run, directory=directory))


def under_torchrun() -> bool:
    """Whether a launcher has started this process as one rank of several."""
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return False
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        value = os.environ.get(name)
        if value is None or not value.isdecimal():
            said = "not set" if value is None else f"{value!r}, which is no number"
            raise ConfigError(
                f"RANK and WORLD_SIZE are in the environment, as under torchrun, but {name} is"
                f" {said}; start with torchrun, which sets them all, or `unset RANK WORLD_SIZE`"
            )
    return True


def listening() -> StopFlag:
    """A flag that signals set from now on: importing torch takes seconds."""
    flag = StopFlag()
    flag.listen()
    return flag
