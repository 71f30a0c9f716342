"""One plain safetensors file of a sharded module, written and read without holding it all.

Writing, rank 0 has one full tensor at a time besides the file; so has every other rank. Reading,
every rank takes its parts from the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from terashard.checkpoint.blocks import byte_view, dtype_name
from terashard.errors import CheckpointError, RunError
from terashard.files import TEMPORARY, sync, writing
from terashard.shard.loading import agreed
from terashard.shard.whole import full_tensors


def save_full(module: nn.Module, path: str | Path) -> None:
    """Write the full state dict of ``module`` to ``path``, a safetensors file, from rank 0.

    Collective. The file appears whole or not at all, and is there when any rank returns. If it
    cannot be written, all ranks raise ``RunError``.
    """
    header = _header(module)
    leads = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    tensors = full_tensors(module)
    problem = None
    if leads:
        try:
            _write(Path(path), header, tensors)
        except RunError as refused:
            problem = str(refused)
    for _ in tensors:  # the others wait for this rank's part of what it did not write
        pass
    problem = agreed(problem)
    if problem is not None:
        raise RunError(problem)


def _write(target: Path, header: bytes, tensors: Iterator[tuple[str, Tensor]]) -> None:
    beside = target.with_name(target.name + TEMPORARY)
    with writing(target):
        try:
            with beside.open("wb") as file:
                file.write(header)
                for _, tensor in tensors:
                    file.write(byte_view(tensor.contiguous()))
                file.flush()
                os.fsync(file.fileno())
            beside.replace(target)
            sync(target.parent)
        except OSError:
            with suppress(OSError):
                beside.unlink()
            raise


class FullFile(Mapping[str, Tensor]):
    """The tensors of a safetensors file by name, read when they are asked for, or parts of them."""

    def __init__(self, path: str | Path) -> None:
        try:
            self._file = safe_open(path, framework="pt")
        except Exception as cause:
            raise CheckpointError(f"cannot read {path}: {cause}") from cause
        self._names = list(self._file.keys())  # type: ignore[no-untyped-call]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, which is not read."""
        return tuple(self._file.get_slice(name).get_shape())  # type: ignore[no-untyped-call]

    def part(self, name: str, ranges: tuple[slice, ...]) -> Tensor:
        """Read a part of one tensor: a range of every dim."""
        if not ranges:
            return self[name]
        part: Tensor = self._file.get_slice(name)[ranges]  # type: ignore[no-untyped-call]
        return part

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor."""
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._names)

    def __len__(self) -> int:
        """How many tensors there are."""
        return len(self._names)


def read_full(path: str | Path) -> FullFile:
    """The tensors of a plain safetensors file, for ``load_full``."""
    return FullFile(path)


def _header(module: nn.Module) -> bytes:
    entries: dict[str, Any] = {}
    begin = 0
    for name, value in module.state_dict().items():
        end = begin + value.numel() * value.element_size()
        entries[name] = {
            "dtype": dtype_name(name, value.dtype),
            "shape": list(value.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
