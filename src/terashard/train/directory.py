"""The files of a run directory, and who writes them.

::

    config.toml      what was asked for, resolved: every key          launcher (under torchrun: rank 0)
    versions.json    terashard, Python, torch and the rest            launcher
    plan.json        how the run is cut                               launcher
    metrics.jsonl    one record a step                                rank 0
    timeline.json    every rank's spans of the last step              rank 0
    status.json      finished, stopped or failed, and after which step     rank 0
    logs/rank-N.log  what rank N said                                 rank N
    errors/rank-N.json   why rank N failed, if it did                 rank N
    checkpoints/     step-00000120/ …, latest                         all ranks
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terashard.config.load import load
from terashard.config.schema import RunConfig
from terashard.config.write import dump, versions
from terashard.errors import CommunicationError, ConfigError
from terashard.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run."""

    path: Path

    @classmethod
    def create(cls, path: Path, config: RunConfig, plan: Plan) -> "RunDirectory":
        """Make the directory, which must not exist, and write what the run is."""
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(
                f"the run directory {path} exists; go on with `terashard resume {path}`,"
                " or choose another with --run.directory"
            ) from None
        except OSError as cause:
            raise ConfigError(f"cannot make the run directory {path}: {cause.strerror}") from cause
        made = cls(path)
        made.describe(config, plan)
        return made

    def describe(self, config: RunConfig, plan: Plan) -> None:
        """Write configuration, versions and plan."""
        (self.path / "config.toml").write_text(dump(config))
        (self.path / "versions.json").write_text(json.dumps(versions(), indent=1) + "\n")
        plan.save(self.path / "plan.json")

    def config(self, overrides: tuple[str, ...] = ()) -> RunConfig:
        """The configuration that was written, with ``overrides`` on top."""
        file = self.path / "config.toml"
        if not file.is_file():
            raise ConfigError(f"{self.path} is no run directory: it has no config.toml")
        return load(file, overrides)

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
        """Say how the run ended."""
        text = json.dumps({"state": state, "step": step, "time": time.time()})
        (self.path / "status.json").write_text(text + "\n")

    def status(self) -> dict[str, Any]:
        """How the run ended; {} while it goes on."""
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
        found = {
            "rank": rank,
            "message": str(error) or repr(error),
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
