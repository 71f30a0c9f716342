"""Everything a run needs to go on, as pieces of a checkpoint, and back, in whatever layout.

Tensors: ``model/NAME`` and ``optimizer/KEY/NAME`` by global parameter name; only the first replica
writes, and of a weight that two stages share only the first stage. The rest (step, data cursor,
tokens, random states, plan, configuration, versions) is the checkpoint's ``extra``.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from terashard.checkpoint.index import JSON
from terashard.checkpoint.load import Checkpoint
from terashard.checkpoint.random_state import decode_torch_state, encode_torch_state
from terashard.checkpoint.save import Piece
from terashard.comm.mesh import Mesh
from terashard.comm.rows import row_range
from terashard.config.load import loads
from terashard.config.schema import RunConfig
from terashard.config.write import dump, versions
from terashard.data.batches import Cursor
from terashard.errors import CheckpointError, ConfigError
from terashard.runtime.pipeline import Pipeline
from terashard.spec.model import ModelSpec


@dataclass(slots=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    tokens: int = 0
    non_finite: int = 0

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Progress":
        """Where ``checkpoint`` was saved."""
        found = checkpoint.extra
        try:
            return cls(
                step=checkpoint.step,
                cursor=Cursor.from_json(found["cursor"]),  # type: ignore[arg-type]
                tokens=int(found["tokens"]),  # type: ignore[arg-type]
                non_finite=int(found["non_finite"]),  # type: ignore[arg-type]
            )
        except (KeyError, TypeError, ValueError, AttributeError) as cause:
            raise CheckpointError(
                f"{checkpoint.path} does not say how far the run had come ({cause}); it was not"
                " written by `terashard train`"
            ) from cause


def extra(progress: Progress, config: RunConfig, pipeline: Pipeline) -> dict[str, JSON]:
    """What a checkpoint keeps besides tensors; every rank calls it."""
    states = pipeline.mesh.world.gather_bytes(encode_torch_state(torch.get_rng_state()).encode())
    return {
        "cursor": progress.cursor.to_json(),
        "tokens": progress.tokens,
        "non_finite": progress.non_finite,
        "random": [state.decode() for state in states],
        "plan": json.loads(json.dumps(asdict(pipeline.plan))),
        "config": dump(config),
        "versions": versions(),
    }


def pieces(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> Iterator[Piece]:
    """The tensors that this rank writes."""
    if pipeline.mesh.coordinates.replica:
        return
    for name, parameter in pipeline.named_parameters():
        if pipeline.canonical(name) != name:
            continue
        yield from _pieces(pipeline.mesh, f"model/{name}", parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                yield from _pieces(pipeline.mesh, f"optimizer/{key}/{name}", value)


def require_match(checkpoint: Checkpoint, spec: ModelSpec, config: RunConfig) -> None:
    """Refuse to go on from ``checkpoint`` with another model or another class of optimizer."""
    stored = {n.removeprefix("model/") for n in checkpoint.names() if n.startswith("model/")}
    for name, shape in spec.parameters().items():
        if name in stored and checkpoint.shape(f"model/{name}") == shape:
            continue
        found = checkpoint.shape(f"model/{name}") if name in stored else "not there"
        raise ConfigError(
            f"{checkpoint.path} is of another model: {name} is {found}, and this run's is {shape};"
            " leave the model's settings as they were"
        )
    if more := sorted(stored - spec.parameters().keys()):
        raise ConfigError(
            f"{checkpoint.path} is of another model: this run's has no {more[0]}; leave the model's"
            " settings as they were"
        )
    before = checkpoint.extra.get("config")
    optimizer = loads(before, "config").optimizer.name if isinstance(before, str) else None
    if optimizer not in (None, config.optimizer.name):
        raise ConfigError(
            f"{checkpoint.path} has the state of {optimizer}, and optimizer.name ="
            f" {config.optimizer.name!r}; go on with the same optimizer"
        )


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
            optimizer.state[parameter][key] = _read(pipeline.mesh, checkpoint, path, parameter)


def restore_random_state(mesh: Mesh, checkpoint: Checkpoint) -> None:
    """Let torch go on drawing random numbers where it was, if there are as many ranks as then."""
    states = checkpoint.extra.get("random")
    if isinstance(states, list) and len(states) == mesh.world.size:
        torch.set_rng_state(decode_torch_state(states[mesh.rank]))


def _read(mesh: Mesh, checkpoint: Checkpoint, path: str, parameter: nn.Parameter) -> Tensor:
    shape = checkpoint.shape(path)
    if not shape:
        return checkpoint.read(path).to(mesh.device)
    value = torch.zeros_like(parameter, dtype=checkpoint.dtype(path), requires_grad=False)
    rows = row_range(shape[0], mesh.shards, mesh.coordinates.shard)
    local = value.to_local() if isinstance(value, DTensor) else value
    local.copy_(checkpoint.read_rows(path, *rows))
    return value


def _pieces(mesh: Mesh, name: str, value: Any) -> Iterator[Piece]:
    """The rows of ``value`` here; what is not cut is written by the first shard."""
    value = torch.as_tensor(value).detach()
    shard = mesh.coordinates.shard
    if isinstance(value, DTensor) and value.dim():
        first, _ = row_range(value.shape[0], mesh.shards, shard)
        yield Piece(name=name, rows=value.to_local(), shape=tuple(value.shape), first_row=first)
    elif shard == 0:
        whole = value.to_local() if isinstance(value, DTensor) else value
        yield Piece(name=name, rows=whole, shape=tuple(whole.shape))
