"""``terashard train``: checks a run without torch, then starts its workers or becomes one."""

import os
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import tyro

from terashard.config.load import load, presets
from terashard.config.schema import RunConfig
from terashard.data.tokens import TokenFolder
from terashard.errors import ConfigError
from terashard.plan.plan import plan_of
from terashard.spec.model import describe
from terashard.train.directory import RunDirectory
from terashard.train.stop import StopFlag


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Train what a run file describes.

    Starts one worker for every rank on this machine; under torchrun, becomes the one of its rank.
    """

    file: Annotated[
        Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.toml", help_behavior_hint="")
    ] = None
    """Run file (TOML)."""
    processes: Annotated[
        int | None, tyro.conf.arg(aliases=["-n"], metavar="N", help_behavior_hint="")
    ] = None
    """Workers to start; by default replicas x stages x shards."""
    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Named settings below the run file: demo, small or tiny."""
    overrides: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()


def run(arguments: Train) -> int:
    """Check the run, then train; returns the exit code of the run."""
    if arguments.file is None and arguments.preset is None:
        raise ConfigError(
            f"train needs a run file (terashard train RUN.toml) or --preset {'|'.join(presets())}"
        )
    config = load(arguments.file, arguments.overrides, arguments.preset)
    check(config, arguments.processes)
    if under_torchrun():
        flag = listening()
        from terashard.train.launch import work

        return work(config, flag)
    config = named(config, arguments.file, arguments.preset)
    from terashard.train.launch import launch

    return launch(config, arguments.processes)


def check(config: RunConfig, processes: int | None = None) -> None:
    """Everything about a run that can be refused without torch."""
    train, cut = config.train, config.parallel
    if train.steps is None and train.tokens is None and train.epochs is None:
        raise ConfigError("the run has no length; give train.steps, train.tokens or train.epochs")
    if not config.data.train:
        raise ConfigError(
            "data.train is empty; name a folder that `terashard data prepare` has made"
        )
    ranks = cut.replicas * cut.stages * cut.shards
    if processes is not None and processes != ranks:
        raise ConfigError(
            f"-n {processes} does not match parallel: {cut.replicas} replicas x {cut.stages} stages"
            f" x {cut.shards} shards = {ranks} processes; leave -n out, or change one of them"
        )
    tokens = TokenFolder.open(config.data.train)
    describe(config.model, vocab_size=tokens.vocab_size, max_length=config.batch.tokens)
    plan_of(config, config.model.num_layers)


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
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def listening() -> StopFlag:
    """A flag that signals set from now on: importing torch takes seconds."""
    flag = StopFlag()
    flag.listen()
    return flag
