"""What is kept of every step: one JSON object a line in ``metrics.jsonl``, the same on every rank, written by rank 0."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step.

    ``loss`` is the mean in nats per target token over all ranks; ``gradient_norm`` is before clipping; ``idle_share`` is the
    part of the step in which the ranks did not compute, mean over ranks; ``skipped`` says that the update was left out;
    ``held_out_loss`` is set after steps that were followed by an evaluation.
    """

    step: int
    loss: float
    gradient_norm: float
    lr: float
    tokens: int
    tokens_total: int
    epoch: int
    seconds: float
    tokens_per_second: float
    idle_share: float
    non_finite: int = 0
    skipped: bool = False
    held_out_loss: float | None = None

    def to_json(self) -> str:
        """One line; what JSON cannot hold (NaN, infinity) becomes a string."""
        return json.dumps({k: _plain(v) for k, v in asdict(self).items()})


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Metrics:
    """``metrics.jsonl``: append, and on resume drop what came after the checkpoint."""

    def __init__(self, path: Path, *, after_step: int = 0) -> None:
        self.path = path
        kept = [line for line in read_lines(path) if json.loads(line)["step"] <= after_step]
        path.write_text("".join(line + "\n" for line in kept))
        self._file = path.open("a", buffering=1)

    def write(self, record: StepRecord) -> None:
        """Append one record."""
        self._file.write(record.to_json() + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lines(path: Path) -> list[str]:
    """The complete lines of a metrics file; none if there is no file."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines() if line.endswith("}")]


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, in order."""
    return [json.loads(line) for line in read_lines(path)]
