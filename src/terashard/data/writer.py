"""How a token folder comes into being: streamed beside its place, renamed when complete.

Both files are streams, so that nothing grows with the corpus: the header of ``documents.npy`` is
written first for zero offsets and again at the end for all of them (numpy pads it to a size that
fits any count).
"""

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from terashard.data.corpus import Document
from terashard.errors import DataError
from terashard.files import sync

_BUFFER = 1 << 20


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``out`` if the block succeeds, and vanishes if it does not.

    Raises ``DataError`` if ``out`` is a file or a folder with something in it, or if writing fails.
    """
    out = Path(os.path.abspath(out))
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise DataError(f"{out} exists already; choose another folder, or remove it first")
        temporary.mkdir(parents=True)
        yield temporary
        for path in [*temporary.iterdir(), temporary]:
            sync(path)
        temporary.rename(out)
        sync(out.parent)
    except OSError as error:
        raise DataError(
            f"cannot write {out}: {error.strerror}; nothing was left behind:"
            " make room or choose another place"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class TokenWriter:
    """Appends documents to ``tokens.bin`` and ``documents.npy`` of a folder, and counts."""

    def __init__(self, folder: Path, dtype: np.dtype[np.unsignedinteger]) -> None:
        self.tokens = self.documents = self.text_bytes = self.replaced = 0
        self._dtype = dtype
        self._digest = blake2b(digest_size=16)
        self._files = ExitStack()
        self._ids = self._open(folder / "tokens.bin")
        self._offsets = self._open(folder / "documents.npy")

    def __enter__(self) -> Self:
        _write_header(self._offsets, 0)
        self._offsets.write(np.int64(0).tobytes())
        return self

    def __exit__(self, *failure: object) -> None:
        with self._files:
            if failure[0] is None:
                self._offsets.seek(0)
                _write_header(self._offsets, self.documents + 1)

    def append(self, documents: Sequence[Document], ids: Sequence[NDArray[np.integer]]) -> None:
        """Add documents with their ids; a document without any is left out."""
        for document, row in zip(documents, ids, strict=True):
            if row.size:
                stored = row.astype(self._dtype, copy=False).tobytes()
                self._ids.write(stored)
                self._digest.update(stored)
                self.tokens += row.size
                self._offsets.write(np.int64(self.tokens).tobytes())
                self.documents += 1
                self.text_bytes += len(document.text.encode())
                self.replaced += document.replaced

    def checksum(self) -> str:
        """blake2b of all ids so far."""
        return self._digest.hexdigest()

    def _open(self, path: Path) -> BinaryIO:
        return self._files.enter_context(path.open("wb", buffering=_BUFFER))


def _write_header(file: BinaryIO, count: int) -> None:
    npy.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (count,)})
