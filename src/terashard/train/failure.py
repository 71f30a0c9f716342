"""Why a run failed, in one message: the rank that failed first, and who was waiting for whom.

Ranks write down their own errors. A rank that was killed, or that never answered, could not: its
exit code tells. A rank that only lost another says where it waited, which is worth a line when the
rank that it waited for said nothing.
"""

import shlex
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from terashard.checkpoint.load import find_latest
from terashard.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    PlanError,
    RunError,
    TerashardError,
)
from terashard.train.directory import RunDirectory
from terashard.train.stop import LEFT_BEHIND

WRONG_INPUT: Mapping[str, type[TerashardError]] = {
    kind.__name__: kind for kind in (ConfigError, PlanError, DataError)
}

LATE = "nothing came in time"
"""What a rank writes down that waited for another in vain."""


def explain(directory: RunDirectory, codes: Mapping[int, int]) -> TerashardError:
    """The error of a run whose ranks ended with ``codes``: rank → exit code, below 0 a signal."""
    errors = directory.errors()
    own = [error for error in errors if not error["secondary"]]
    if own and own[0]["kind"] in WRONG_INPUT:
        return WRONG_INPUT[own[0]["kind"]](str(own[0]["message"]))
    lines = [_line(own[0])] if own else _silent(codes, errors)
    if not own:
        lines += [_line(error) for error in errors[:2]]
    if not lines:
        lines = [f"workers ended with the exit codes {dict(sorted(codes.items()))}"]
    restoring = not directory.status()  # it says "running" from the first step on
    damaged = restoring and own and own[0]["kind"] == "CheckpointError"
    way_on = _older(directory) if damaged else advice(directory)
    return RunError("\n".join([*lines, f"logs: {directory.path / 'logs'}", way_on]))


def advice(directory: RunDirectory) -> str:
    """How to go on."""
    try:
        found = find_latest(directory.checkpoints)
    except CheckpointError:
        return "no checkpoint was written yet"
    return f"go on from {found.name} with: {resume_command(directory)}"


def resume_command(directory: RunDirectory) -> str:
    """What to type to go on; ready to be pasted."""
    return f"terashard resume {shlex.quote(str(directory.path))}"


def _older(directory: RunDirectory) -> str:
    """How to go on when the newest checkpoint may be the one that is damaged."""
    folder = directory.checkpoints
    names = sorted(path.name for path in folder.glob("step-*") if path.suffix != ".tmp")
    return (
        f"checkpoints: {', '.join(names) or 'none'}; `terashard resume` takes the one that"
        f" {folder / 'latest'} names: write the name of an older one there to go on from it"
    )


def own_message(directory: RunDirectory, rank: int) -> str:
    """What ``rank`` wrote down."""
    found = [error for error in directory.errors() if error["rank"] == rank]
    return _line(found[0]) if found else f"rank {rank} failed"


def _silent(codes: Mapping[int, int], errors: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ranks that died or stayed behind without a word; ``errors`` of the others, in time."""
    told, lines = {error["rank"] for error in errors}, []
    late = bool(errors) and LATE in str(errors[0]["message"])
    for rank, code in sorted(codes.items()):
        if code == -signal.SIGKILL and late and rank not in told:
            # the launcher kills what does not end on SIGTERM: a stopped process cannot
            lines.append(f"rank {rank} did not answer and was ended")
        elif code < 0 and code != -signal.SIGTERM and rank not in told:
            lines.append(f"rank {rank} was killed by {signal.Signals(-code).name}")
        elif code == LEFT_BEHIND:
            lines.append(f"rank {rank} did not answer; the end of its log shows where it was")
    return lines


def _line(error: Mapping[str, Any]) -> str:
    text, rank = str(error["message"]), error["rank"]
    return text if text.startswith("rank ") else f"rank {rank}: {text}"
