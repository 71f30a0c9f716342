"""Files that are whole, as they are now or as they were before: never torn, never half a rename.

::

    NAME.tmp   written, synced
    NAME       replaced by NAME.tmp; its folder synced

A disk that fills up ends the first line, and NAME stays as it was.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from terashard.errors import RunError

TEMPORARY = ".tmp"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in one sentence that ``path`` could not be written, if the system refuses it."""
    try:
        yield
    except OSError as cause:
        raise RunError(
            f"cannot write {path} ({cause.strerror or cause}); make room for it, or make the folder"
            " writable"
        ) from cause


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write into, which becomes ``path`` once it is closed and on the disk.

    If anything fails, ``path`` holds what it held; ``RunError`` if the system refuses it.
    """
    beside = path.with_name(path.name + TEMPORARY)
    with writing(path):
        try:
            with beside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
            sync(path.parent)
        except BaseException:
            with suppress(OSError):
                beside.unlink()
            raise


def replace_text(path: Path, text: str) -> None:
    """Let ``path`` hold ``text``; if that fails, ``RunError``, and it holds what it held."""
    with replacing(path) as file:
        file.write(text.encode())


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and see it on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """See a file's bytes, or a folder's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
