"""``terashard resume``: goes on from the last complete checkpoint of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from terashard.cli.train import listening, under_torchrun
from terashard.config.override import read_overrides
from terashard.errors import ConfigError
from terashard.train.directory import RunDirectory
from terashard.train.preflight import check


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Go on from the last complete checkpoint of a run, in the same layout or in another one."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """Run directory."""
    overrides: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()


def run(arguments: Resume) -> int:
    """Check the directory and the options, then train on; returns the exit code of the run."""
    if not arguments.directory.is_dir():
        raise ConfigError(
            f"there is no run directory {arguments.directory}; it is printed when a run starts"
        )
    if "run.directory" in read_overrides(arguments.overrides):
        raise ConfigError("a run goes on where it is: leave --run.directory out")
    check(RunDirectory(arguments.directory).config(arguments.overrides))
    flag = listening() if under_torchrun() else None
    from terashard.train.launch import resume

    return resume(arguments.directory, arguments.overrides, flag)
