"""One plain safetensors file of a sharded module, written and read without holding it all.

Writing, rank 0 has one full tensor at a time besides the file; so has every other rank. Reading,
every rank takes its parts from the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from terashard.checkpoint.blocks import byte_view, dtype_name, header
from terashard.comm.collectives import leads, sent
from terashard.errors import CheckpointError, RunError
from terashard.files import replacing
from terashard.shard.whole import full_values


def save_full(module: nn.Module, path: str | Path) -> None:
    """Write the full state dict of ``module`` to ``path``, a safetensors file, from rank 0.

    Collective. The file appears whole or not at all, and is there when any rank returns. If it
    cannot be written, all ranks raise ``RunError``.
    """
    head = _header(module)
    tensors = full_values(module)
    problem, cause = None, None
    if leads():
        try:
            with replacing(Path(path)) as file:
                file.write(head)
                for _, tensor in tensors:
                    file.write(byte_view(tensor.contiguous()))
        except Exception as error:
            problem, cause = str(error) or type(error).__name__, error
    for _ in tensors:  # the others wait for this rank's part of what it did not write
        pass
    problem = sent(problem)
    if problem is not None:
        raise RunError(problem) from cause


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
    state = module.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name} is a {type(value).__name__}, and a safetensors file holds tensors alone;"
                " take full_state_dict, or torch's checkpoints"
            )
    return header((n, dtype_name(n, t.dtype), t) for n, t in state.items())
