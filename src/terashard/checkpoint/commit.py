r"""All or nothing: how a checkpoint becomes visible, and which ones stay.

::

    step-00000120.tmp/   (1) files of all ranks, each synced
    step-00000120.tmp/   (2) index.json, synced; then the folder
    latest.tmp           (3) "step-00000120", synced
    step-00000120/       (4) renamed; root synced
    latest               (5) replaced by latest.tmp; root synced
    step-00000100.tmp/   (6) the oldest: renamed, then removed

A crash before (4) leaves a folder that nobody reads and that the next save removes (or, where it
cannot, leaves there with a warning, and takes another name); a crash before
(5), a complete checkpoint beside a ``latest`` that names an older one. Everything that can fill the
disk comes before (4): what follows only renames. So at every moment, a name without ``.tmp`` is a
complete checkpoint. A second checkpoint of the same step (a run that went back and came again)
never replaces the first: it is named ``step-00000120-2``.
"""

import os
import re
import shutil
import warnings
from pathlib import Path

from terashard.checkpoint.index import sequence_in
from terashard.errors import CheckpointError
from terashard.files import TEMPORARY, sync, write_synced

INDEX = "index.json"
LATEST = "latest"

_HEAD_BYTES = 256

_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")


def begin(root: Path, step: int) -> Path:
    """Remove what dead runs left in ``root``; make and return the temporary folder of ``step``."""
    if step < 0:
        raise CheckpointError(f"step is {step}; it must be at least 0")
    if not root.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        sync(root.parent)
    for left in root.glob(f"step-*{TEMPORARY}"):
        if _NAME.fullmatch(left.name.removesuffix(TEMPORARY)):
            _try_remove(left)
    folder = _free(root, f"step-{step:08d}")
    folder.mkdir()
    return folder


def _free(root: Path, name: str) -> Path:
    number, free = 1, name
    while any(os.path.lexists(root / taken) for taken in (free, free + TEMPORARY)):
        number += 1
        free = f"{name}-{number}"
    return root / (free + TEMPORARY)


def _try_remove(folder: Path) -> None:
    """Remove a folder, of a symbolic link the link alone; if that fails, warn and go on."""
    try:
        _remove(folder)
    except OSError as error:
        warnings.warn(f"{folder} could not be removed: {error}", RuntimeWarning, stacklevel=3)


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def publish(folder: Path, index: str) -> Path:
    """Complete the temporary ``folder`` and make it visible (2 to 5); returns where it is then."""
    root, final = folder.parent, folder.with_name(folder.name.removesuffix(TEMPORARY))
    write_synced(folder / INDEX, index.encode())  # (2)
    sync(folder)
    pointer = root / (LATEST + TEMPORARY)
    write_synced(pointer, f"{final.name}\n".encode())  # (3)
    folder.rename(final)  # (4)
    sync(root)
    pointer.replace(root / LATEST)  # (5)
    sync(root)
    return final


def discard(folder: Path) -> None:
    """Remove the temporary ``folder`` of a failed save, or leave it to the next save."""
    shutil.rmtree(folder, ignore_errors=True)


def prune(root: Path, keep: int) -> None:
    """Remove complete checkpoints but the ``keep`` last written and the one in ``latest`` (6).

    An old checkpoint that cannot be removed is a warning, not an error: the new one is complete.
    """
    named = read_latest(root)
    for old in complete(root)[max(keep, 0) :]:
        if old == named:
            continue
        try:
            _remove(old.rename(old.with_name(old.name + TEMPORARY)))
        except OSError as error:
            warnings.warn(f"{old} could not be removed: {error}", RuntimeWarning, stacklevel=2)


def complete(root: Path) -> list[Path]:
    """Every complete checkpoint in ``root``, last written first.

    A run that went back to an older one writes lower steps later, so steps alone do not tell;
    checkpoints that were not counted come after all others, in order of their steps.
    """
    found = [
        ((_sequence(path), int(match[1]), int(match[2] or 1)), path)
        for path in root.glob("step-*")
        if (match := _NAME.fullmatch(path.name)) and (path / INDEX).is_file()
    ]
    return [path for _, path in sorted(found, reverse=True)]


def next_sequence(root: Path) -> int:
    """The sequence number of the next checkpoint in ``root``."""
    return 1 + max((_sequence(path) for path in complete(root)), default=0)


def _sequence(folder: Path) -> int:
    """Read from the head of the index, which may be long; 0 if it cannot be read."""
    try:
        with (folder / INDEX).open("rb") as file:
            return sequence_in(file.read(_HEAD_BYTES).decode(errors="replace"))
    except OSError:
        return 0


def read_latest(root: Path) -> Path | None:
    """The folder that ``latest`` names, if it names one; it may be missing or incomplete."""
    try:
        name = (root / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return root / name if _NAME.fullmatch(name) else None
