"""A file is whole at every moment, whatever the disk says."""

import errno
import os
from pathlib import Path

import pytest

from terashard import files
from terashard.errors import RunError


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_holds_the_new_text_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    for text in ("old", "new µ"):
        files.replace_text(tmp_path / "config.toml", text)
    assert (tmp_path / "config.toml").read_text("utf-8") == "new µ"
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_a_sentence_and_the_file_stays_as_it_was(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's configuration was truncated first and written then: a full disk destroyed it."""
    path = tmp_path / "config.toml"
    files.replace_text(path, "old")
    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), full)
    with pytest.raises(RunError, match=r"cannot write .*config.toml \(No space left on device\)"):
        files.replace_text(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_the_bytes_are_synced_before_the_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for home, name in ((os, "fsync"), (Path, "replace")):

        def watch(*given: object, name: str = name, real: object = getattr(home, name)) -> object:
            calls.append(name)
            assert callable(real)
            return real(*given)

        monkeypatch.setattr(home, name, watch)
    files.replace_text(tmp_path / "x", "text")
    assert calls == ["fsync", "replace", "fsync"]
