"""The files of a run directory, and who writes them.

::

    config.toml      what was asked for, resolved: every key                  launcher, rank 0
    versions.json    terashard, Python, torch and the rest                    launcher, rank 0
    plan.json        how the run is cut                                       launcher, rank 0
    resume.toml      what a resume asks for, until it has begun               launcher
    metrics.jsonl    one record a step                                        rank 0
    timeline.json    every rank's spans of the last step                      rank 0
    status.json      running, stopped, finished or failed, after which step   rank 0, launcher
    lock             held by the launcher (under torchrun: rank 0) while the run goes on
    logs/rank-N.log  what rank N did, said and complained of                  rank N
    errors/rank-N.json   why rank N failed, if it did                         rank N
    checkpoints/     step-00000120/ …, latest                                 all ranks

A directory belongs to one run. One in which no step was done, because the start failed, may be
used again under the same name: nothing is lost but the logs of the failure, which are appended to.
"""

import fcntl
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from terashard.config.load import load
from terashard.config.schema import RunConfig
from terashard.config.write import dump, versions
from terashard.errors import CommunicationError, ConfigError, TerashardError
from terashard.plan.plan import Plan
from terashard.train.record import read_lines


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run."""

    path: Path

    def create(self) -> IO[str]:
        """Make the directory, which must be new (see above), and hold it."""
        self.require_new()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return self.hold()
        except OSError as cause:
            raise ConfigError(
                f"cannot write the run directory {self.path} ({cause.strerror}); choose another"
                " with --run.directory"
            ) from cause

    def require_new(self) -> None:
        """Refuse a directory that holds a run, or anything else."""
        if not self.path.exists() or self._is_unused():
            return
        raise ConfigError(
            f"the run directory {self.path} exists; go on with `terashard resume {self.path}`,"
            " or choose another with --run.directory"
        )

    def _is_unused(self) -> bool:
        """Whether it is empty, or left by a run that failed before its first step."""
        if not self.path.is_dir():
            return False
        ours = (self.path / "lock").exists() or not any(self.path.iterdir())
        return ours and not read_lines(self.metrics) and not self.checkpoints.exists()

    def hold(self) -> IO[str]:
        """Keep other runs out until the returned file is closed or this process ends."""
        file = (self.path / "lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ConfigError(
                f"the run in {self.path} is going on; wait for its end, or stop it with Ctrl-C"
            ) from None
        except OSError:
            pass  # a file system without locks
        return file

    def describe(self, config: RunConfig, plan: Plan) -> None:
        """Write configuration, versions and plan: the run has been found possible."""
        (self.path / "versions.json").write_text(json.dumps(versions(), indent=1) + "\n")
        (self.path / "config.toml").write_text(dump(config))
        self.request.unlink(missing_ok=True)
        plan.save(self.plan)

    def config(self, overrides: tuple[str, ...] = ()) -> RunConfig:
        """The configuration that was written, with ``overrides`` on top."""
        file = self.path / "config.toml"
        if not file.is_file():
            raise ConfigError(
                f"{self.path} is no run directory: it has no config.toml; give the directory that"
                " the run printed"
            )
        return load(file, overrides)

    @property
    def request(self) -> Path:
        """What a resume asks for; it becomes config.toml once the resume has begun."""
        return self.path / "resume.toml"

    @property
    def plan(self) -> Path:
        """How the run is cut."""
        return self.path / "plan.json"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The record of every step."""
        return self.path / "metrics.jsonl"

    @property
    def timeline(self) -> Path:
        """Spans of the last step."""
        return self.path / "timeline.json"

    def log(self, rank: int) -> Path:
        """The log file of one rank, its folder made."""
        (self.path / "logs").mkdir(exist_ok=True)
        return self.path / "logs" / f"rank-{rank}.log"

    def write_status(self, state: str, step: int) -> None:
        """Say how the run stands."""
        text = json.dumps({"state": state, "step": step, "time": time.time()})
        (self.path / "status.json").write_text(text + "\n")

    def status(self) -> dict[str, Any]:
        """How the run stands; {} if it has not begun."""
        file = self.path / "status.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found

    def begin(self) -> None:
        """Forget how an earlier part of the run ended."""
        (self.path / "status.json").unlink(missing_ok=True)
        for old in (self.path / "errors").glob("rank-*.json"):
            old.unlink()

    def write_error(self, rank: int, error: BaseException) -> None:
        """Say why a rank failed."""
        folder = self.path / "errors"
        folder.mkdir(exist_ok=True)
        ours = isinstance(error, TerashardError)
        found = {
            "rank": rank,
            "message": str(error) if ours else f"{type(error).__name__}: {error}",
            "kind": type(error).__name__,
            "secondary": isinstance(error, CommunicationError),
            "time": time.time(),
        }
        (folder / f"rank-{rank}.json").write_text(json.dumps(found) + "\n")

    def errors(self) -> list[dict[str, Any]]:
        """Why ranks failed: first those that did not merely lose a peer, then in order of time."""
        found = []
        for file in (self.path / "errors").glob("rank-*.json"):
            try:
                found.append(json.loads(file.read_text()))
            except ValueError:
                continue  # the rank was killed while it wrote
        return sorted(found, key=lambda e: (e["secondary"], e["time"]))
