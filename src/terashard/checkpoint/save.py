r"""Writes a checkpoint: every rank its own pieces, all of them or none.

A rank's file is a plain safetensors file, written here and not by the library, for three reasons:
pieces are brought to the host's memory one at a time (the library first copies every tensor of a
device), pieces may be views of one storage (the library refuses them), and checksums are taken from
the bytes on their way to the disk. The layout::

    8 bytes   length H of the header, little-endian, a multiple of 8
    H bytes   {"model/layers.3.mlp.up.weight@256":
                  {"dtype": "F32", "shape": [256, 128], "data_offsets": [begin, end]}, …}
    the rest  the pieces' bytes without gaps, wider elements first, so that each piece is aligned

An entry's key is the tensor's name, "@", and its first row.
Source: the description of the format at github.com/huggingface/safetensors.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from terashard.checkpoint import commit
from terashard.checkpoint.blocks import (
    block_rows,
    byte_view,
    checksum,
    dtype_name,
    header,
    num_rows,
    split_blocks,
)
from terashard.checkpoint.index import (
    JSON,
    Index,
    StoredPiece,
    StoredTensor,
    merge,
)
from terashard.comm.group import Group
from terashard.errors import CheckpointError
from terashard.files import sync


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """Rows of one tensor that this rank holds and writes. A 0-dim tensor is one row, row 0."""

    name: str
    """Global name, e.g. ``model/layers.3.mlp.up.weight``; any text."""
    rows: Tensor
    """The rows, on any device: the whole shape but for dim 0. May be empty."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    first_row: int = 0
    """Place of the first row in the whole tensor."""

    def __post_init__(self) -> None:
        """Refuse rows that are no part of the tensor."""
        local = tuple(self.rows.shape)
        stop = self.first_row + num_rows(local)
        if (
            len(local) != len(self.shape)
            or local[1:] != tuple(self.shape[1:])
            or not 0 <= self.first_row <= stop <= num_rows(self.shape)
        ):
            raise CheckpointError(
                f"tensor {self.name!r}: shape {local} from row {self.first_row} on is no part of"
                f" shape {tuple(self.shape)}; pass rows of dim 0 and the place of the first"
            )

    @property
    def key(self) -> str:
        """Name of the entry in the safetensors file."""
        return f"{self.name}@{self.first_row}"

    @property
    def dtype(self) -> str:
        """Element type as safetensors writes it."""
        return dtype_name(self.name, self.rows.dtype)

    @property
    def block_rows(self) -> int:
        """Rows that have a checksum together."""
        return block_rows(self.shape, self.dtype)


def save(
    root: Path,
    step: int,
    pieces: Iterable[Piece],
    extra: Mapping[str, JSON],
    *,
    group: Group,
    keep: int,
) -> Path:
    """Write a checkpoint of ``step`` into ``root``, then remove all but the ``keep`` last written.

    Called by every member of ``group``, with the rows that this member owns: over all members,
    every row of every tensor exactly once (a replica passes nothing). ``root`` lies where all
    members see it. ``extra`` is that of member 0. Returns the checkpoint's folder. If any member
    fails, every member raises one ``CheckpointError``, and earlier checkpoints stay as they are.
    """
    leads = group.rank == 0
    root = Path(root)
    begun = _everywhere(group, lambda: commit.begin(root, step).name.encode() if leads else b"")
    folder = root / begun[0].decode()
    try:
        wrote = _everywhere(group, lambda: _write_own(folder, group.rank, list(pieces)))
        done = _everywhere(group, lambda: _finish(folder, step, wrote, extra) if leads else b"")
    except CheckpointError:
        if leads:
            commit.discard(folder)
        raise
    if leads:
        commit.prune(root, keep)
    return root / done[0].decode()


def _everywhere(group: Group, act: Callable[[], bytes]) -> list[bytes]:
    """Every member's answer, or ``CheckpointError`` on every member if ``act`` failed on any."""
    cause: Exception | None = None
    try:
        answer = b"+" + act()
    except Exception as error:  # whatever it is, the other members must hear of it
        cause = error
        found = str(error).split("\n")[0] or type(error).__name__
        answer = b"-" + found.encode(errors="replace")
    answers = group.gather_bytes(answer)
    for position, text in enumerate(answers):
        if text.startswith(b"-"):
            raise CheckpointError(
                f"rank {group.ranks[position]} could not save: {text[1:].decode()};"
                " earlier checkpoints are intact"
            ) from cause
    return [text[1:] for text in answers]


def _write_own(folder: Path, rank: int, pieces: Sequence[Piece]) -> bytes:
    """Write this rank's file; returns the part of the index that describes it."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not there; checkpoints must lie where every rank sees them"
        )
    path = folder / f"rank-{rank:05d}.safetensors"
    by_width = sorted(pieces, key=lambda piece: -piece.rows.element_size())
    with path.open("wb") as file:
        held = [piece for piece in by_width if num_rows(piece.rows.shape)]
        file.write(header((piece.key, piece.dtype, piece.rows) for piece in held))
        checksums = [_write_piece(file, piece) for piece in by_width]
        file.flush()
        os.fsync(file.fileno())
    sync(folder)
    parts = [
        (piece.name, asdict(_describe(path.name, piece, found)))
        for piece, found in zip(by_width, checksums, strict=True)
    ]
    return json.dumps({"file": path.name, "bytes": path.stat().st_size, "parts": parts}).encode()


def _write_piece(file: BinaryIO, piece: Piece) -> tuple[int, ...]:
    """Write the bytes of a piece; returns the checksum of each of its blocks."""
    checksums = []
    for data in split_blocks(byte_view(piece.rows), num_rows(piece.rows.shape), piece.block_rows):
        checksums.append(checksum(data))
        file.write(data)
    return tuple(checksums)


def _describe(file: str, piece: Piece, checksums: tuple[int, ...]) -> StoredTensor:
    """A piece as the index has it; one without rows tells element type and shape alone."""
    stored = StoredPiece(
        file=file,
        key=piece.key,
        first_row=piece.first_row,
        rows=num_rows(piece.rows.shape),
        block_rows=piece.block_rows,
        checksums=checksums,
    )
    pieces = (stored,) if stored.rows else ()
    return StoredTensor(dtype=piece.dtype, shape=tuple(piece.shape), pieces=pieces)


def _finish(folder: Path, step: int, answers: Sequence[bytes], extra: Mapping[str, JSON]) -> bytes:
    """See that all rows are there, and make the checkpoint visible; returns its name."""
    read = [json.loads(answer) for answer in answers]
    index = Index(
        step=step,
        sequence=commit.next_sequence(folder.parent),
        files={own["file"]: own["bytes"] for own in read},
        tensors=merge((n, StoredTensor.from_data(t)) for own in read for n, t in own["parts"]),
        extra=dict(extra),
    )
    return commit.publish(folder, index.to_json()).name.encode()
