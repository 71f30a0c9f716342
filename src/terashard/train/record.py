"""What is kept of every step: one JSON object a line in ``metrics.jsonl``, written by rank 0.

All ranks hold the same record but for its times.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from terashard.files import replace_text, writing


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step."""

    step: int
    """Steps done, this one included: the first is 1."""
    loss: float
    """What is made smaller: mean in nats per target token over all ranks, before the update.

    It has label smoothing and z-loss in it, if the run has them; without, it is cross-entropy.
    """
    gradient_norm: float
    """Over all parameters, before clipping."""
    lr: float
    """Learning rate of the update (of the groups that have none of their own)."""
    tokens: int
    """Target tokens of this step."""
    tokens_total: int
    """Target tokens since the run began."""
    epoch: int
    """Pass over the training sequences that the step began in, from 0."""
    seconds: float
    """From drawing the batch to the end of the update."""
    tokens_per_second: float
    """``tokens / seconds``."""
    idle_share: float
    """Part of the step in which the ranks did not compute, mean over ranks."""
    non_finite: int = 0
    """Steps since the run began whose loss or gradient norm was NaN or infinite."""
    skipped: bool = False
    """Whether the update was left out."""
    held_out_loss: float | None = None
    """Cross-entropy in nats per held-out target token, of the evaluation after this step if any.

    Never label smoothing or z-loss: it compares with other models and with tables of frequencies.
    """

    def to_json(self) -> str:
        """One line; what JSON cannot hold (NaN, infinity) becomes a string."""
        return json.dumps({k: _plain(v) for k, v in asdict(self).items()})


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Metrics:
    """``metrics.jsonl``, open for appending."""

    def __init__(self, path: Path, *, after_step: int = 0) -> None:
        """Open ``path``; records past ``after_step``, which will be made again, are dropped."""
        kept = [line for line in read_lines(path) if json.loads(line)["step"] <= after_step]
        replace_text(path, "".join(f"{line}\n" for line in kept))
        self._path = path
        with writing(path):
            self._file = path.open("a", buffering=1)

    def write(self, record: StepRecord) -> None:
        """Append one record."""
        with writing(self._path):
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
