r"""Reads a checkpoint: any rows of any tensor, whatever layout wrote them.

``Checkpoint.read_rows(name, start, stop)`` gathers rows from every piece that holds some of them.
Files are mapped, so only what is asked for is read, rounded up to whole blocks of rows (about
4 MiB, ``blocks.py``): the checksum of each block is verified on every read, before any row of it is
handed out.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from terashard.checkpoint import commit
from terashard.checkpoint.blocks import DTYPES, byte_view, checksum, num_rows
from terashard.checkpoint.index import JSON, Index, StoredPiece, StoredTensor
from terashard.errors import CheckpointError


def find_latest(root: Path) -> Path:
    """The checkpoint that ``latest`` names, or the last written complete one.

    The second if what ``latest`` names is not complete. Complete: its index can be read, and every
    file has the size that the index says.
    """
    root = Path(root)
    named = commit.read_latest(root)
    for folder in [*([named] if named else []), *commit.complete(root)]:
        if _is_complete(folder):
            return folder
    raise CheckpointError(
        f"{root} holds no complete checkpoint; give a folder with step-… folders in it"
    )


def _is_complete(folder: Path) -> bool:
    try:
        files = Checkpoint.open(folder).files
        return all((folder / file).stat().st_size == size for file, size in files.items())
    except (CheckpointError, OSError):
        return False


class Checkpoint:
    """A complete checkpoint, open for reading. Not to be shared between threads."""

    def __init__(self, path: Path, index: Index) -> None:
        self.path = path
        self._index = index
        self._open_files: dict[str, Any] = {}

    @classmethod
    def open(cls, path: Path) -> "Checkpoint":
        """Read the index of the checkpoint in folder ``path``."""
        file = Path(path) / commit.INDEX
        try:
            return cls(Path(path), Index.from_json(file.read_text(encoding="utf-8")))
        except OSError as error:
            raise CheckpointError(
                f"{path} is no checkpoint ({error.strerror}: {file.name}); give a step-… folder"
            ) from error
        except (CheckpointError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} cannot be used: {error}") from error

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self._index.step

    @property
    def extra(self) -> Mapping[str, JSON]:
        """What the run kept besides tensors."""
        return self._index.extra

    @property
    def files(self) -> Mapping[str, int]:
        """Every safetensors file and its size in bytes."""
        return self._index.files

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(self._index.tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a tensor."""
        return self._tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a tensor."""
        return DTYPES[self._tensor(name).dtype]

    def read(self, name: str, *, shape: tuple[int, ...] | None = None) -> Tensor:
        """A whole tensor, on the CPU; ``shape``, if given, must be the stored one."""
        return self.read_rows(name, 0, num_rows(self.shape(name)), shape=shape)

    def read_rows(
        self, name: str, start: int, stop: int, *, shape: tuple[int, ...] | None = None
    ) -> Tensor:
        """Rows ``[start, stop)`` of dim 0, on the CPU; ``shape``, if given, is the whole tensor's.

        A 0-dim tensor is one row: ``read_rows(name, 0, 1)`` is 0-dim.
        """
        tensor = self._tensor(name)
        self._check(name, start, stop, shape)
        dtype = DTYPES[tensor.dtype]
        rows = torch.empty((stop - start, *tensor.shape[1:]), dtype=dtype)
        for piece in tensor.pieces:
            first, last = piece.first_row, piece.first_row + piece.rows
            if max(first, start) < min(last, stop):
                within = range(max(start - first, 0), min(stop, last) - first)
                offset = first + within.start - start
                self._copy(name, piece, within, rows[offset : offset + len(within)])
        return rows if tensor.shape or start == stop else rows.reshape(())

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self._index.tensors:
            raise CheckpointError(
                f"{self.path} holds no tensor {name!r}; it is of another model or optimizer,"
                f" take one of this run (it holds {', '.join(self.names()[:3])}, …)"
            )
        return self._index.tensors[name]

    def _check(self, name: str, start: int, stop: int, shape: tuple[int, ...] | None) -> None:
        stored = self.shape(name)
        if shape is not None and tuple(shape) != stored:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has shape {stored}, and {tuple(shape)} is wanted;"
                " take a checkpoint of the same model"
            )
        if not 0 <= start <= stop <= num_rows(stored):
            raise CheckpointError(
                f"{self.path}: rows {start} to {stop} of tensor {name!r} are asked for;"
                f" it has rows 0 to {num_rows(stored)}"
            )

    def _copy(self, name: str, piece: StoredPiece, within: range, into: Tensor) -> None:
        """Copy rows ``within`` of a piece, verifying every block that they touch."""
        mapped = self._map(name, piece)
        step = piece.block_rows
        for number in range(within.start // step, -(-within.stop // step)):
            block = mapped[number * step : (number + 1) * step]
            if checksum(byte_view(block)) != piece.checksums[number]:
                raise self._damaged(name, piece, "its bytes do not have the checksum of the index")
            low = max(within.start, number * step)
            high = min(within.stop, number * step + len(block))
            into[low - within.start : high - within.start] = block[
                low - number * step : high - number * step
            ]

    def _map(self, name: str, piece: StoredPiece) -> Tensor:
        """A piece as a tensor over the mapped file: its bytes are read when they are touched."""
        tensor = self._tensor(name)
        try:
            mapped: Tensor = self._file(piece.file).get_tensor(piece.key)
        except (OSError, SafetensorError) as error:
            raise self._damaged(name, piece, str(error)) from error
        shape = (piece.rows, *tensor.shape[1:]) if tensor.shape else ()
        if mapped.dtype != DTYPES[tensor.dtype] or tuple(mapped.shape) != shape:
            found = f"it holds {mapped.dtype} of shape {tuple(mapped.shape)}"
            raise self._damaged(name, piece, found)
        return mapped if tensor.shape else mapped.reshape(1)

    def _file(self, file: str) -> Any:
        if file not in self._open_files:
            path = self.path / file
            size = path.stat().st_size
            if size != self.files[file]:
                raise OSError(f"it has {size} bytes instead of {self.files[file]}")
            self._open_files[file] = safe_open(path, framework="pt")
        return self._open_files[file]

    def _damaged(self, name: str, piece: StoredPiece, found: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path / piece.file} is damaged at tensor {name!r}: {found};"
            " take another checkpoint"
        )
