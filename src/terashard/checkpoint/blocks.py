r"""Tensors as bytes: names of types, blocks of rows, and their checksums.

A tensor of shape ``[rows, …]`` is cut along dim 0 into *blocks*: runs of ``block_rows`` rows of
about 4 MiB, at least one row each, the last one possibly shorter. Every block has its own CRC-32,
so a reader of a few rows reads and verifies the blocks that hold them, and nothing else. A 0-dim
tensor counts as one row.

CRC-32 finds damage, not forgery: it runs at gigabytes per second on one core, and it misses about
one random change in 2^32.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from terashard.errors import CheckpointError

BLOCK_BYTES = 1 << 22

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Name of an element type in a safetensors header → torch's."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """How a safetensors header writes ``dtype``, the element type of tensor ``name``."""
    if dtype not in _NAMES:
        raise CheckpointError(
            f"tensor {name!r} has elements of {dtype}; a checkpoint holds {', '.join(DTYPES)}"
        )
    return _NAMES[dtype]


def header(tensors: Iterable[tuple[str, str, Tensor]]) -> bytes:
    """The head of a safetensors file of (key, name of the element type, tensor), in their order."""
    entries: dict[str, Any] = {}
    begin = 0
    for key, dtype, tensor in tensors:
        end = begin + tensor.numel() * tensor.element_size()
        entries[key] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def num_rows(shape: Sequence[int]) -> int:
    """Extent of dim 0; a 0-dim tensor counts as one row."""
    return shape[0] if shape else 1


def block_rows(shape: Sequence[int], dtype: str) -> int:
    """Rows of one block of a tensor of this shape and type."""
    return max(1, BLOCK_BYTES // max(1, prod(shape[1:]) * DTYPES[dtype].itemsize))


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order; a contiguous tensor on the CPU is not copied."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def split_blocks(data: memoryview, rows: int, rows_per_block: int) -> Iterator[memoryview]:
    """The bytes of ``rows`` rows, block by block."""
    row_bytes = len(data) // rows if rows else 0
    for start in range(0, rows, rows_per_block):
        yield data[start * row_bytes : (start + rows_per_block) * row_bytes]


def checksum(data: bytes | memoryview) -> int:
    """CRC-32 of some bytes."""
    return zlib.crc32(data)
