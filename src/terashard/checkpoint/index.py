r"""The index of a checkpoint: where the rows of every tensor are, each exactly once.

``index.json`` is one JSON object::

    {"checksum": 305419896,                     CRC-32 of all that follows the comma and the space
     "format": "terashard-checkpoint", "version": 1, "step": 120, "sequence": 7,
     "files": {"rank-00000.safetensors": 1048576, …},                             sizes in bytes
     "tensors": {"model/layers.3.mlp.up.weight": {"dtype": "F32", "shape": [512, 128], "pieces": [
         {"file": "rank-00000.safetensors", "key": "model/layers.3.mlp.up.weight@0",
          "first_row": 0, "rows": 256, "block_rows": 8192, "checksums": [2596996162]}, …]}, …},
     "extra": {…}}

``first_row`` and ``rows`` place a piece along dim 0 of the whole tensor; blocks and checksums are
those of ``blocks.py``. ``sequence`` counts the saves into one folder, whatever their steps: a run
that goes back writes lower steps later. A tensor without rows has no pieces. NaN and infinities in
``extra`` are written as Python's ``json`` writes them.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from terashard.checkpoint.blocks import DTYPES, checksum, num_rows
from terashard.errors import CheckpointError

FORMAT = "terashard-checkpoint"
VERSION = 1

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
"""A value that JSON can hold."""

_HEAD = re.compile(r'\{"checksum": (\d{1,10}), ')
_SEQUENCE = re.compile(r'"step": \d+, "sequence": (\d{1,18}),')
_FILE = re.compile(r"rank-\d{5,}\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """Rows ``[first_row, first_row + rows)`` of a tensor: entry ``key`` of ``file``."""

    file: str
    key: str
    first_row: int
    rows: int
    block_rows: int
    checksums: tuple[int, ...]
    """One per block of rows."""

    def __post_init__(self) -> None:
        """Refuse a file outside the checkpoint, and blocks that are not those of the rows."""
        if not _FILE.fullmatch(self.file):
            raise ValueError(f"{self.file!r} is no file of a checkpoint")
        if self.block_rows < 1 or len(self.checksums) != -(-self.rows // self.block_rows):
            raise ValueError(f"{self.key!r} has {len(self.checksums)} checksums")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Element type, whole shape and pieces, in order of their rows, of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    def __post_init__(self) -> None:
        """Refuse an element type that no reader knows."""
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.dtype!r} is no element type")

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> "StoredTensor":
        """The tensor whose ``asdict`` went through JSON."""
        pieces = [StoredPiece(**p | {"checksums": tuple(p["checksums"])}) for p in data["pieces"]]
        shape = tuple(data["shape"])
        return StoredTensor(dtype=data["dtype"], shape=shape, pieces=tuple(pieces))


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Everything about a checkpoint but the bytes of its tensors."""

    step: int
    sequence: int = 0
    """Place among the saves into the same folder; 0 in those that were not counted."""
    files: Mapping[str, int]
    """File → its size in bytes."""
    tensors: Mapping[str, StoredTensor]
    extra: Mapping[str, JSON]

    def __post_init__(self) -> None:
        """Refuse pieces in files that are not listed."""
        used = {piece.file for tensor in self.tensors.values() for piece in tensor.pieces}
        if not used <= self.files.keys():
            raise ValueError(f"{', '.join(sorted(used - self.files.keys()))} is not listed")

    def to_json(self) -> str:
        """The text of ``index.json``."""
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        rest = json.dumps(body).removeprefix("{")
        return f'{{"checksum": {checksum(rest.encode())}, {rest}'

    @staticmethod
    def from_json(text: str) -> "Index":
        """Read an ``index.json``; ``CheckpointError`` if it is damaged or of another version."""
        data = _parse(text)
        try:
            return Index(
                step=data["step"],
                sequence=data.get("sequence", 0),
                files=data["files"],
                tensors=merge((n, StoredTensor.from_data(t)) for n, t in data["tensors"].items()),
                extra=data["extra"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"it is incomplete ({error}); take another checkpoint") from error


def sequence_in(head: str) -> int:
    """The sequence number in the first characters of an ``index.json``; 0 if there is none."""
    found = _SEQUENCE.search(head)
    return int(found[1]) if found else 0


def _parse(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"it is no JSON ({error}); take another checkpoint") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CheckpointError(f'it does not say "format": "{FORMAT}"; give a checkpoint\'s folder')
    if data.get("version") != VERSION:
        raise CheckpointError(
            f"it is of version {data.get('version')!r}, and this terashard reads version {VERSION};"
            " read it with the release that wrote it"
        )
    head = _HEAD.match(text)
    if head is None or int(head[1]) != checksum(text[head.end() :].encode()):
        raise CheckpointError(
            "its text does not have its checksum: it was damaged or edited; take another checkpoint"
        )
    return data


def merge(parts: Iterable[tuple[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """Whole tensors from parts with some pieces each; every row must come exactly once."""
    pieces: dict[str, list[StoredPiece]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in parts:
        kind = (tensor.dtype, tensor.shape)
        if kinds.setdefault(name, kind) != kind:
            raise CheckpointError(
                f"tensor {name!r} is {kinds[name]} in one piece and {kind} in another;"
                " pieces of a tensor must agree on its element type and whole shape"
            )
        pieces.setdefault(name, []).extend(tensor.pieces)
    return {name: _whole(name, kinds[name], found) for name, found in pieces.items()}


def _whole(name: str, kind: tuple[str, tuple[int, ...]], pieces: list[StoredPiece]) -> StoredTensor:
    dtype, shape = kind
    ordered = tuple(sorted(pieces, key=lambda piece: piece.first_row))
    stops = [0, *(piece.first_row + piece.rows for piece in ordered)]
    starts = [*(piece.first_row for piece in ordered), num_rows(shape)]
    for number, (stop, start) in enumerate(zip(stops, starts, strict=True)):
        if stop < start:
            found = f"rows {stop} to {start - 1} are in no file"
        elif stop > start:
            files = " and ".join(piece.file for piece in ordered[number - 1 : number + 1])
            found = f"row {start} comes twice, in {files}"
        else:
            continue
        raise CheckpointError(f"tensor {name!r}: {found}; exactly one rank must pass each row")
    return StoredTensor(dtype=dtype, shape=shape, pieces=ordered)
