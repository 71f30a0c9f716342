"""One message for a run that failed: the first cause, and who waited for whom if that is all."""

from pathlib import Path

import pytest

from terashard.comm.process import _cause
from terashard.errors import (
    CheckpointError,
    CommunicationError,
    ConfigError,
    DataError,
    RunError,
)
from terashard.train.directory import RunDirectory
from terashard.train.failure import explain, own_message
from terashard.train.stop import LEFT_BEHIND


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    found = RunDirectory(tmp_path / "run")
    found.create().close()
    return found


def lines(directory: RunDirectory, codes: dict[int, int]) -> list[str]:
    error = explain(directory, codes)
    assert type(error) is RunError
    *found, logs, advice = str(error).splitlines()
    assert logs == f"logs: {directory.path / 'logs'}"
    assert advice == "no checkpoint was written yet"
    return found


def test_the_first_cause_hides_what_followed_from_it(directory: RunDirectory) -> None:
    directory.write_error(0, CommunicationError("rank 0 lost rank 1"))
    directory.write_error(1, ValueError("bad"))
    directory.write_error(2, ValueError("bad, later"))
    assert lines(directory, {0: 1, 1: 1, 2: 1}) == ["rank 1: ValueError: bad"]


def test_a_killed_rank_is_named_with_who_waited(directory: RunDirectory) -> None:
    directory.write_error(0, CommunicationError("rank 0 (stage 0) waits for rank 1"))
    assert lines(directory, {0: 1, 1: -9}) == [
        "rank 1 was killed by SIGKILL",
        "rank 0 (stage 0) waits for rank 1",
    ]


def test_a_rank_that_was_ended_because_it_did_not_answer_is_not_called_killed(
    directory: RunDirectory,
) -> None:
    """A stopped process does not end on SIGTERM: the launcher's SIGKILL was given as the cause."""
    waited = f"rank 0 waits for rank 1: {_cause(RuntimeError('Timed out waiting 3000ms'))}"
    directory.write_error(0, CommunicationError(waited))
    directory.write_error(2, CommunicationError("rank 2 waits for rank 0: it is gone"))
    found = lines(directory, {0: 1, 1: -9, 2: 1})
    assert found[:2] == ["rank 1 did not answer and was ended", waited]


def test_a_rank_that_did_not_answer_is_named(directory: RunDirectory) -> None:
    directory.write_error(0, CommunicationError("rank 0 waits for rank 1"))
    assert lines(directory, {0: 1, 1: LEFT_BEHIND})[0] == (
        "rank 1 did not answer; the end of its log shows where it was"
    )


def test_ranks_that_the_launcher_ended_are_not_blamed(directory: RunDirectory) -> None:
    directory.write_error(0, ValueError("bad"))
    assert lines(directory, {0: 1, 1: -15}) == ["rank 0: ValueError: bad"]
    directory.begin()
    assert lines(directory, {0: 3, 1: -15}) == ["workers ended with the exit codes {0: 3, 1: -15}"]


@pytest.mark.parametrize("kind", [ConfigError, DataError])
def test_wrong_input_is_one_sentence_whoever_finds_it(
    kind: type[Exception], directory: RunDirectory
) -> None:
    for rank in (1, 0):
        directory.write_error(rank, kind("token id 300 is outside the vocabulary"))
    found = explain(directory, {0: 1, 1: 1})
    assert type(found) is kind
    assert str(found) == "token id 300 is outside the vocabulary"


def test_a_rank_under_torchrun_tells_its_own_error(directory: RunDirectory) -> None:
    directory.write_error(1, ValueError("bad"))
    assert own_message(directory, 1) == "rank 1: ValueError: bad"
    assert own_message(directory, 2) == "rank 2 failed"


def test_only_a_checkpoint_that_could_not_be_restored_sends_to_an_older_one(
    directory: RunDirectory,
) -> None:
    (directory.checkpoints / "step-00000005").mkdir(parents=True)
    directory.write_error(0, CheckpointError("rank-00000.safetensors is damaged"))
    assert "write the name of an older one there" in str(explain(directory, {0: 1}))
    directory.write_status("running", 7)
    assert "older one" not in str(explain(directory, {0: 1}))
