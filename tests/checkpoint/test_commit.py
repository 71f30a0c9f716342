import contextlib
import errno
import io
import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from terashard.checkpoint.load import Checkpoint, find_latest
from terashard.errors import CheckpointError
from tests.checkpoint.cuts import same, sample, save_alone

CALLS = ["mkdir", "rename", "replace", "unlink", "rmdir", "open", "fsync"]


class Killed(BaseException):
    """The process ends here: no handler runs that a dead process would not run."""


def watch(patch: pytest.MonkeyPatch, step: Callable[[str, Callable[[], Any], Any], Any]) -> None:
    """Send every file-system call of a save through ``step(name, call, target)``."""

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *a, **k: step(name, lambda: real(*a, **k), a[0])

    for module, names in ((os, CALLS), (io, ["open"])):
        for name in names:
            patch.setattr(module, name, watched(name, getattr(module, name)))


def close(opened: Any) -> None:
    """Close what a call opened, as the end of a process does."""
    if isinstance(opened, io.IOBase):
        opened.close()
    elif isinstance(opened, int):
        os.close(opened)


@contextlib.contextmanager
def fail_at(number: int, failure: BaseException, *, done: bool) -> Iterator[list[str]]:
    """Raise at the file-system call ``number``, before it or, if ``done``, right after it."""
    names: list[str] = []

    def step(name: str, call: Callable[[], Any], target: Any) -> Any:
        names.append(name)
        if len(names) == number + 1:
            if done:
                close(call())
            raise failure
        return call()

    with pytest.MonkeyPatch.context() as patch:
        watch(patch, step)
        yield names


def holds(path: Path, step: int) -> bool:
    """Whether the checkpoint at ``path`` is that of ``step``, to the last bit."""
    checkpoint = Checkpoint.open(path)
    wanted = sample(step)
    return (
        checkpoint.step == step
        and checkpoint.extra == {"step": step}
        and checkpoint.names() == tuple(sorted(wanted))
        and all(same(checkpoint.read(name), tensor) for name, tensor in wanted.items())
    )


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("done", [False, True], ids=["before the call", "after the call"])
def test_a_kill_at_any_file_system_call_leaves_a_complete_checkpoint(
    tmp_path: Path, done: bool
) -> None:
    stages: set[int] = set()
    for number in range(1000):
        root = tmp_path / str(number)
        save_alone(root, 1, keep=1)
        (root / "step-00000009.tmp").mkdir()  # of a run that died earlier
        try:
            with fail_at(number, Killed(), done=done) as calls:
                save_alone(root, 2, keep=1)
        except Killed:
            found = 1 if holds(find_latest(root), 1) else 2
            assert holds(find_latest(root), found), calls
            stages.add(found)
            save_alone(root, 3, keep=1)
            assert holds(find_latest(root), 3)
            assert names_in(root) == ["latest", "step-00000003"], calls
            continue
        assert len(calls) == number
        assert stages == {1, 2}
        assert set(calls) == set(CALLS)
        return


def attempt(act: Callable[[], Path]) -> tuple[CheckpointError | None, Path]:
    """What ``act`` raised, or what it returned."""
    try:
        return None, act()
    except CheckpointError as error:
        return error, Path()


@pytest.mark.parametrize("done", [False, True], ids=["before the call", "after the call"])
def test_an_error_of_any_file_system_call_leaves_old_or_new(tmp_path: Path, done: bool) -> None:
    for number in range(1000):
        root = tmp_path / str(number)
        old = save_alone(root, 1, keep=1)
        full = OSError(errno.ENOSPC, "No space left on device")
        with fail_at(number, full, done=done) as calls, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            refusal, new = attempt(lambda root=root: save_alone(root, 2, keep=1))
        if refusal is None:
            assert find_latest(root) == new
            assert holds(new, 2)
        else:
            assert "rank 0 could not save: [Errno 28] No space left on device" in str(refusal)
            assert refusal.__cause__ is full
            assert holds(old, 1)
            assert calls[number] == "mkdir" or not list(root.glob("step-*.tmp")), calls
            assert holds(find_latest(root), 2 if "replace" in calls[: number + done] else 1), calls
        if len(calls) == number:
            return


def test_bytes_are_on_the_disk_before_the_name_that_promises_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The witness of a power cut: the order of syncs and renames."""
    events: list[str] = []

    def step(name: str, call: Callable[[], Any], target: Any) -> Any:
        if name == "fsync":
            events.append("sync " + Path(os.readlink(f"/proc/self/fd/{target}")).name)
        elif name in ("rename", "replace"):
            events.append(f"{name} {Path(target).name}")
        return call()

    save_alone(tmp_path, 1, keep=1)
    watch(monkeypatch, step)
    save_alone(tmp_path, 2, keep=1)
    assert events == [
        "sync rank-00000.safetensors",
        "sync step-00000002.tmp",
        "sync index.json",
        "sync step-00000002.tmp",
        "sync latest.tmp",
        "rename step-00000002.tmp",
        f"sync {tmp_path.name}",
        "replace latest.tmp",
        f"sync {tmp_path.name}",
        "rename step-00000001",
    ]


def test_the_newest_are_kept_and_the_one_in_use_always(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_alone(tmp_path, step, keep=2)
    assert names_in(tmp_path) == ["latest", "step-00000003", "step-00000004"]
    save_alone(tmp_path, 2, keep=2)  # a run that went back to step 1
    assert find_latest(tmp_path).name == "step-00000002"
    assert names_in(tmp_path) == ["latest", "step-00000002", "step-00000004"]
    save_alone(tmp_path, 5, keep=2)
    assert names_in(tmp_path) == ["latest", "step-00000002", "step-00000005"]


def test_a_step_saved_twice_gets_a_name_of_its_own(tmp_path: Path) -> None:
    first = save_alone(tmp_path, 7)
    again = save_alone(tmp_path, 7)
    assert (first.name, again.name) == ("step-00000007", "step-00000007-2")
    assert find_latest(tmp_path) == again
    (tmp_path / "latest").unlink()
    assert find_latest(tmp_path) == again
    assert save_alone(tmp_path, 7, keep=1).name == "step-00000007-3"
    assert names_in(tmp_path) == ["latest", "step-00000007-3"]


def test_only_what_saves_left_behind_is_removed(tmp_path: Path) -> None:
    left = ["step-00000001.tmp", "step-00000002-3.tmp", "step-123456789.tmp"]
    foreign = ["step-x.tmp", "notes.tmp", "step-00000000", "step-00000001-x"]
    for name in left + foreign:
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_bytes(b"half")
    save_alone(tmp_path, 5, keep=1)
    assert names_in(tmp_path) == sorted([*foreign, "latest", "step-00000005"])


def test_an_old_checkpoint_that_cannot_go_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = save_alone(tmp_path, 1, keep=1)
    really_rename = os.rename

    def rename(source: Path, target: Path) -> None:
        if Path(source) == old:
            raise OSError(errno.EACCES, "Permission denied")
        really_rename(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.warns(RuntimeWarning, match="step-00000001 could not be removed: .*Permission"):
        new = save_alone(tmp_path, 2, keep=1)
    assert find_latest(tmp_path) == new


def test_a_negative_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step is -1; it must be at least 0"):
        save_alone(tmp_path, -1)


def test_an_old_checkpoint_behind_a_link_loses_the_link_alone(tmp_path: Path) -> None:
    """Regression: the link was renamed, could not be removed, and stopped every later save."""
    root, archive = tmp_path / "run", tmp_path / "archive"
    save_alone(root, 1).rename(archive)
    (root / "step-00000001").symlink_to(archive)
    save_alone(root, 2, keep=1)
    assert names_in(root) == ["latest", "step-00000002"]
    assert holds(archive, 1)
    (root / "step-00000001.tmp").symlink_to(archive)
    save_alone(root, 3, keep=1)
    assert names_in(root) == ["latest", "step-00000003"]
    assert holds(archive, 1)


def test_a_leftover_that_cannot_go_is_a_warning_and_its_name_is_not_used(tmp_path: Path) -> None:
    save_alone(tmp_path, 1)
    (tmp_path / "step-00000002.tmp").write_bytes(b"no folder")
    with pytest.warns(RuntimeWarning, match=r"step-00000002\.tmp could not be removed"):
        path = save_alone(tmp_path, 2)
    assert path.name == "step-00000002-2"
    assert find_latest(tmp_path) == path
    assert holds(path, 2)


def test_a_run_that_went_back_keeps_its_new_checkpoints(tmp_path: Path) -> None:
    """Regression: the highest steps stayed, which were those of the abandoned branch."""
    for step in (1, 5, 6):
        save_alone(tmp_path, step, keep=3)
    (tmp_path / "latest").write_text("step-00000001\n")
    for step in (2, 3):
        save_alone(tmp_path, step, keep=2)
    assert names_in(tmp_path) == ["latest", "step-00000002", "step-00000003"]
    (tmp_path / "latest").write_text("step-00000001\n")
    assert find_latest(tmp_path).name == "step-00000003"


def test_checkpoints_that_were_not_counted_come_after_all_others_by_step(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        index = save_alone(tmp_path, step, keep=9) / "index.json"
        text = re.sub(r'"sequence": \d+, ', "", index.read_text().split(", ", 1)[1])
        index.write_text(f'{{"checksum": {zlib.crc32(text.encode())}, {text}')
    (tmp_path / "latest").unlink()
    assert find_latest(tmp_path).name == "step-00000003"
    save_alone(tmp_path, 0, keep=2)
    assert names_in(tmp_path) == ["latest", "step-00000000", "step-00000003"]
