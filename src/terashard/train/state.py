"""Everything a run needs to go on, as pieces of a checkpoint, and back, in whatever layout.

Tensors: ``model/NAME`` and ``optimizer/KEY/NAME`` by global parameter name; only the first replica writes, and of a weight
that two stages share only the first stage. The rest (step, data cursor, tokens, random states, plan, configuration) is the
checkpoint's ``extra``.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from terashard.checkpoint.load import Checkpoint
from terashard.checkpoint.save import Piece
from terashard.comm.rows import row_range
from terashard.runtime.pipeline import Pipeline


def pieces(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> Iterator[Piece]:
    """What this rank writes."""
    if pipeline.mesh.coordinates.replica:
        return
    for name, parameter in pipeline.named_parameters():
        if pipeline.canonical(name) != name:
            continue
        yield from _pieces(pipeline, f"model/{name}", parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            yield from _pieces(pipeline, f"optimizer/{key}/{name}", value)


def restore_model(pipeline: Pipeline, checkpoint: Checkpoint) -> None:
    """Write this rank's rows of every parameter."""

    def fill(name: str, shape: torch.Size, rows: tuple[int, int]) -> Tensor:
        stored = f"model/{pipeline.canonical(name)}"
        return checkpoint.read_rows(stored, *rows, shape=tuple(shape))

    pipeline.fill(fill)


def restore_optimizer(
    pipeline: Pipeline, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint
) -> None:
    """Write this rank's rows of the optimizer's state."""
    stored: dict[str, list[str]] = {}
    for path in checkpoint.names():
        kind, _, rest = path.partition("/")
        if kind == "optimizer":
            key, _, name = rest.partition("/")
            stored.setdefault(name, []).append(key)
    for name, parameter in pipeline.named_parameters():
        canonical = pipeline.canonical(name)
        for key in stored.get(canonical, ()):
            path = f"optimizer/{key}/{canonical}"
            optimizer.state[parameter][key] = _read(pipeline, checkpoint, path, parameter)


def _read(pipeline: Pipeline, checkpoint: Checkpoint, path: str, parameter: nn.Parameter) -> Tensor:
    shape = checkpoint.shape(path)
    if not shape or shape != tuple(parameter.shape):
        return checkpoint.read(path).to(pipeline.mesh.device)
    value = torch.zeros_like(parameter, dtype=checkpoint.dtype(path), requires_grad=False)
    rows = row_range(shape[0], pipeline.mesh.shards, pipeline.mesh.coordinates.shard)
    local = value.to_local() if isinstance(value, DTensor) else value
    local.copy_(checkpoint.read_rows(path, *rows))
    return value


def _pieces(pipeline: Pipeline, name: str, value: Any) -> Iterator[Piece]:
    """The rows of ``value`` here; what is not cut is written by the first shard."""
    value = torch.as_tensor(value).detach()
    shard = pipeline.mesh.coordinates.shard
    if isinstance(value, DTensor) and value.dim():
        first, _ = row_range(value.shape[0], pipeline.mesh.shards, shard)
        yield Piece(name=name, rows=value.to_local(), shape=tuple(value.shape), first_row=first)
    elif shard == 0:
        whole = value.to_local() if isinstance(value, DTensor) else value
        yield Piece(name=name, rows=whole, shape=tuple(whole.shape))
