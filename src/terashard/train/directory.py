"""The files of a run directory, and who writes them.

::

    config.toml      what was asked for, resolved: every key                  launcher, rank 0
    versions.json    terashard, Python, torch and the rest                    launcher, rank 0
    plan.json        how the run is cut                                       launcher, rank 0
    resume.toml      what a resume asks for, until its first step               launcher
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
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from terashard.config.load import load
from terashard.config.schema import RunConfig
from terashard.config.write import dump, versions
from terashard.errors import CommunicationError, ConfigError, RunError, TerashardError
from terashard.files import replace_text, writing
from terashard.train.record import read_lines

if TYPE_CHECKING:
    from terashard.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run."""

    path: Path

    def create(self) -> IO[str]:
        """Make the directory, which must be new (see above), and hold it."""
        self.require_new()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise self._unwritable(cause) from cause
        return self.hold()

    def require_new(self) -> None:
        """Refuse a directory that holds a run, or anything else."""
        if not self.path.exists() or self._is_unused():
            return
        quoted = shlex.quote(str(self.path))
        way_on = (
            f"go on with `terashard resume {quoted}`, or choose another with --run.directory"
            if self.checkpoints.exists() or not (self.path / "lock").exists()
            else "its run never saved a checkpoint: choose another with --run.directory, or remove"
            f" it with `rm -r {quoted}`"
        )
        raise ConfigError(f"the run directory {self.path} exists; {way_on}")

    def _is_unused(self) -> bool:
        """Whether it is empty, or left by a run that failed before its first step."""
        if not self.path.is_dir():
            return False
        ours = (self.path / "lock").exists() or not any(self.path.iterdir())
        return ours and not read_lines(self.metrics) and not self.checkpoints.exists()

    def hold(self) -> IO[str]:
        """Keep other runs out until the returned file is closed or this process ends."""
        try:
            file = (self.path / "lock").open("w")
        except OSError as cause:
            raise self._unwritable(cause) from cause
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

    def _unwritable(self, cause: OSError) -> ConfigError:
        return ConfigError(
            f"cannot write the run directory {self.path} ({cause.strerror}); make it writable, or"
            " choose another for a new run with --run.directory"
        )

    def describe(self, config: RunConfig, plan: "Plan") -> None:
        """Write configuration, versions and plan: the run has been found possible."""
        replace_text(self.path / "versions.json", json.dumps(versions(), indent=1) + "\n")
        replace_text(self.path / "config.toml", dump(config))
        plan.save(self.plan)
        with writing(self.request):
            self.request.unlink(missing_ok=True)

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
        path = self.path / "logs" / f"rank-{rank}.log"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        return path

    def write_status(self, state: str, step: int) -> None:
        """Say how the run stands."""
        text = json.dumps({"state": state, "step": step, "time": time.time()})
        replace_text(self.path / "status.json", text + "\n")

    def status(self) -> dict[str, Any]:
        """How the run stands; {} if it has not begun, or nobody can read it."""
        try:
            found = json.loads((self.path / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def last_step(self) -> int:
        """The last step that was recorded; 0 if none was."""
        lines = read_lines(self.metrics)
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def begin(self) -> None:
        """Forget how an earlier part of the run ended."""
        with writing(self.path / "status.json"):
            (self.path / "status.json").unlink(missing_ok=True)
            for old in (self.path / "errors").glob("rank-*.json"):
                old.unlink()

    def write_error(self, rank: int, error: BaseException) -> None:
        """Say why a rank failed, and where, if there is room to write it; its log says it too."""
        folder = self.path / "errors"
        found = {
            "rank": rank,
            "message": _message(error),
            "kind": type(error).__name__,
            "secondary": isinstance(error, CommunicationError),
            "time": time.time(),
        }
        with suppress(OSError, RunError):
            folder.mkdir(exist_ok=True)
            replace_text(folder / f"rank-{rank}.json", json.dumps(found) + "\n")

    def errors(self) -> list[dict[str, Any]]:
        """Why ranks failed: first those that did not merely lose a peer, then in order of time."""
        found = []
        for file in (self.path / "errors").glob("rank-*.json"):
            try:
                found.append(json.loads(file.read_text()))
            except ValueError:
                continue  # the rank was killed while it wrote
        return sorted(found, key=lambda e: (e["secondary"], e["time"]))


def _message(error: BaseException) -> str:
    """What ``error`` says, with its notes: a module's own error has rank, stage and cell there."""
    said = str(error) if isinstance(error, TerashardError) else f"{type(error).__name__}: {error}"
    return "; ".join([said, *getattr(error, "__notes__", ())])
