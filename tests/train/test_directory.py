"""Who may use a run directory, and what is written there when."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from terashard.config.schema import BatchConfig, RunConfig
from terashard.errors import CommunicationError, ConfigError, RunError
from terashard.plan.plan import Plan
from terashard.train.directory import RunDirectory

PLAN = Plan.uniform(sequences=1, tokens=4)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "runs" / "one")


def test_a_new_directory_is_made_with_its_parents(directory: RunDirectory) -> None:
    with directory.create():
        directory.describe(RunConfig(), PLAN)
    assert directory.config() == RunConfig()
    assert "torch" in json.loads((directory.path / "versions.json").read_text())


def test_a_directory_in_which_a_step_was_done_is_refused(directory: RunDirectory) -> None:
    with directory.create():
        directory.metrics.write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"never saved a checkpoint: .* `rm -r .*one`"):
        directory.create()
    directory.checkpoints.mkdir()
    with pytest.raises(
        ConfigError, match=r"exists; go on with `terashard resume .*one`, or choose"
    ):
        directory.create()


def test_a_directory_with_anything_else_in_it_is_refused(directory: RunDirectory) -> None:
    directory.path.mkdir(parents=True)
    (directory.path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="exists"):
        directory.create()


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("")
    with pytest.raises(ConfigError, match="exists"):
        RunDirectory(tmp_path / "one").create()


def test_a_directory_whose_run_failed_before_its_first_step_may_be_used_again(
    directory: RunDirectory,
) -> None:
    with directory.create():
        directory.describe(RunConfig(), PLAN)
        directory.log(0).write_text("failed")
        directory.metrics.write_text("")
    with directory.create():
        assert directory.log(0).read_text() == "failed"


def test_an_empty_directory_may_be_used(directory: RunDirectory) -> None:
    directory.path.mkdir(parents=True)
    directory.create().close()


def test_a_directory_is_held_by_one_run_at_a_time(directory: RunDirectory) -> None:
    with directory.create():
        for other in (directory.create, directory.hold):
            with pytest.raises(ConfigError, match="is going on; wait for its end, or stop it"):
                other()
    directory.hold().close()


def test_a_place_where_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*Not a directory\); make it writable"):
        RunDirectory(tmp_path / "file" / "run").create()


def test_what_is_no_run_directory_is_not_resumed(directory: RunDirectory) -> None:
    with pytest.raises(ConfigError, match=r"no run directory: it has no config.toml; give"):
        directory.config()


def test_overrides_go_over_the_written_configuration(directory: RunDirectory) -> None:
    directory.create().close()
    directory.describe(RunConfig(), PLAN)
    assert directory.config(("--train.steps", "7")).train.steps == 7


def test_a_request_is_dropped_once_the_run_is_described(directory: RunDirectory) -> None:
    directory.create().close()
    directory.request.write_text("")
    directory.describe(RunConfig(), PLAN)
    assert not directory.request.exists()


def test_a_new_beginning_forgets_how_the_last_part_ended(directory: RunDirectory) -> None:
    directory.create().close()
    directory.write_status("failed", 3)
    directory.write_error(0, ValueError("x"))
    assert directory.status()["step"] == 3
    directory.begin()
    assert directory.status() == {}
    assert directory.errors() == []


def test_first_causes_come_before_lost_connections(directory: RunDirectory) -> None:
    directory.create().close()
    directory.write_error(0, CommunicationError("rank 0 waits"))
    directory.write_error(2, KeyError("x"))
    directory.write_error(1, ConfigError("no such device"))
    (directory.path / "errors" / "rank-3.json").write_text('{"rank"')  # killed while writing
    found = [(e["rank"], e["kind"], e["message"]) for e in directory.errors()]
    assert found == [
        (2, "KeyError", "KeyError: 'x'"),
        (1, "ConfigError", "no such device"),
        (0, "CommunicationError", "rank 0 waits"),
    ]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_the_configuration_of_a_run_as_it_was(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was truncated in place, and the run could never be resumed."""
    directory.create().close()
    directory.describe(RunConfig(), PLAN)
    directory.write_status("running", 3)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"cannot write .*versions.json \(No space left on device"):
        directory.describe(replace(RunConfig(), batch=BatchConfig(tokens=7)), PLAN)
    with pytest.raises(RunError, match=r"cannot write .*status.json"):
        directory.write_status("failed", 4)
    assert directory.config() == RunConfig()
    assert directory.status()["step"] == 3


def test_a_failure_that_cannot_be_written_down_hides_nothing(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of write_error took the place of the one it should write."""
    directory.create().close()
    monkeypatch.setattr(os, "fsync", full)
    directory.write_error(0, ValueError("x"))
    assert directory.errors() == []


@pytest.mark.parametrize("text", ["", '{"state": "run', "[]", "\x00"])
def test_a_torn_status_is_none(text: str, directory: RunDirectory) -> None:
    """The launcher ended with a JSONDecodeError."""
    directory.create().close()
    (directory.path / "status.json").write_text(text)
    assert directory.status() == {}


def test_a_directory_that_cannot_be_held_is_a_sentence(directory: RunDirectory) -> None:
    """The lock was opened where nothing caught what the system said."""
    (directory.path / "lock").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"cannot write the run directory .*make it writable"):
        directory.hold()


def test_the_place_of_a_failure_goes_with_its_message(directory: RunDirectory) -> None:
    """A module's own exception says nothing of ranks; the worker notes where it happened."""
    directory.create().close()
    error = ValueError("bad shape")
    error.add_note("rank 3 (stage 1), position 4: this happened in F1.0.2")
    directory.write_error(3, error)
    (found,) = directory.errors()
    assert found["message"] == (
        "ValueError: bad shape; rank 3 (stage 1), position 4: this happened in F1.0.2"
    )
