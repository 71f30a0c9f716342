"""Everything a run needs to go on, as pieces of a checkpoint, and back, in whatever layout.

Tensors: ``model/NAME`` and ``optimizer/KEY/NAME`` by global parameter name; only the first replica
writes, and of a weight that two stages share only the first stage. The rest (step, data cursor and
what it counts, tokens, random states, plan, configuration, versions) is the checkpoint's ``extra``.
"""

import json
from collections.abc import Iterator, Mapping
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
from terashard.shard.materialise import Fill
from terashard.spec.model import ModelSpec
from terashard.train.optimizer import options_of
from terashard.train.samples import Samples

STATE_OF = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
"""Option of an optimizer → the state that it adds."""


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


def extra(
    progress: Progress, config: RunConfig, samples: Samples, pipeline: Pipeline
) -> dict[str, JSON]:
    """What a checkpoint keeps besides tensors; every rank calls it."""
    return {
        "cursor": progress.cursor.to_json(),
        "samples": samples.identity(),
        "tokens": progress.tokens,
        "non_finite": progress.non_finite,
        "random": _random_states(pipeline.mesh),
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
    _require_state(checkpoint, spec, config)


def _require_state(checkpoint: Checkpoint, spec: ModelSpec, config: RunConfig) -> None:
    """Refuse options whose state torch makes at a parameter's first step only, if it is missing."""
    stored = set(checkpoint.names())
    for name in spec.parameters():
        options = options_of(config.optimizer, name)
        for option, key in STATE_OF.items():
            counted = f"optimizer/step/{name}" in stored
            if counted and options.get(option) and f"optimizer/{key}/{name}" not in stored:
                raise ConfigError(
                    f"{checkpoint.path} has no {key} of {name}, which the optimizer option {option}"
                    f" = {options[option]} needs from the first step on; leave {option} as it was,"
                    " or begin a new run"
                )


def require_same_samples(checkpoint: Checkpoint, samples: Samples) -> None:
    """Refuse data in which the cursor of ``checkpoint``, a number of samples, means others.

    ``batch.sequences`` may change: the cursor counts samples, not batches.
    """
    before = checkpoint.extra.get("samples")
    if not isinstance(before, Mapping):
        return
    for key, value in samples.identity().items():
        if before.get(key, value) != value:
            raise ConfigError(
                f"{checkpoint.path} has trained on other samples: {key} says {before[key]} there"
                f" and {value} here, so that the run would repeat and leave out tokens unseen;"
                f" leave {key} as it was, or begin a new run"
            )


def fill_from(checkpoint: Checkpoint, spec: ModelSpec) -> Fill:
    """Parameters as ``checkpoint`` has them, for a stage on meta; of tied weights it has one."""

    def fill(name: str, shape: torch.Size, rows: tuple[int, int]) -> Tensor:
        tied = spec.tied and name == "head.output.weight"
        stored = "embed.tokens.weight" if tied else name
        return checkpoint.read_rows(f"model/{stored}", *rows, shape=tuple(shape))

    return fill


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
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in pipeline.named_parameters():
        canonical = pipeline.canonical(name)
        for key in stored.get(canonical, ()) if parameter in groups else ():
            path = f"optimizer/{key}/{canonical}"
            scalars = scalar_device(key, groups[parameter], pipeline.mesh.device)
            value = _read(pipeline.mesh, checkpoint, path, parameter)
            optimizer.state[parameter][key] = value if value.dim() else value.to(scalars)


def restore_random_state(mesh: Mesh, checkpoint: Checkpoint) -> None:
    """Let torch go on drawing random numbers where it was, if there are as many ranks as then."""
    states = checkpoint.extra.get("random")
    if not isinstance(states, list) or len(states) != mesh.world.size:
        return
    mine = states[mesh.rank]
    if not isinstance(mine, Mapping):
        return
    torch.set_rng_state(decode_torch_state(mine.get("cpu")))
    if "cuda" in mine and mesh.device.type == "cuda":
        torch.cuda.set_rng_state(decode_torch_state(mine["cuda"]), mesh.device)


def scalar_device(key: str, group: Mapping[str, Any], device: torch.device) -> torch.device:
    """Where a number of an optimizer's state lives.

    As torch has it: a class whose kernels do not count steps themselves counts them on the CPU;
    on a GPU, every parameter's step would then wait for the GPU.
    """
    counts = group.get("fused") or group.get("capturable")
    return torch.device("cpu") if key == "step" and not counts else device


def _random_states(mesh: Mesh) -> list[JSON]:
    """Every rank's states of torch's generators: of the CPU, and of its GPU if it has one."""
    mine = {"cpu": encode_torch_state(torch.get_rng_state())}
    if mesh.device.type == "cuda":
        mine["cuda"] = encode_torch_state(torch.cuda.get_rng_state(mesh.device))
    return [json.loads(found) for found in mesh.world.gather_bytes(json.dumps(mine).encode())]


def _read(mesh: Mesh, checkpoint: Checkpoint, path: str, parameter: nn.Parameter) -> Tensor:
    shape = checkpoint.shape(path)
    if not shape:
        return checkpoint.read(path)
    stored = checkpoint.dtype(path)
    dtype = parameter.dtype if stored.is_floating_point else stored  # train.precision may change
    value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
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
