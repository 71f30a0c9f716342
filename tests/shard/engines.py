"""The same program under torch's engine, under ours, and in one process without any."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import terashard
from tests.helpers.torch_threads import run_ranks

ENGINES: dict[str, ModuleType] = {"torch": fsdp, "ours": terashard}
WIDTH, WORDS = 6, 11


class Block(nn.Module):
    """Two linear layers beside the stream."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Words to words, through blocks."""

    def __init__(self, blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def seeded(module: nn.Module, seed: int = 0) -> nn.Module:
    """``module`` in float64 (complex128) with values that depend on ``seed`` and names alone."""
    generator = torch.Generator().manual_seed(seed)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.4 * drawn)
    return module


def shard(model: Any, *shape: int, engine: Any = terashard, **arguments: Any) -> Any:
    """Every block a unit, the rest the root's, on a mesh of ``shape``."""
    mesh = mesh_of(*shape)
    for block in model.blocks:
        engine.fully_shard(block, mesh=mesh, **arguments)
    return engine.fully_shard(model, mesh=mesh, **arguments)


def words(rank: int, step: int, rows: int = 3) -> Tensor:
    """A batch [rows, 4] of one rank and step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(0, WORDS, (rows, 4), generator=generator)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy of the words themselves."""
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh ("replicate", "shard") or ("shard",)."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def whole(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor in full, a copy."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in values.items()
    }


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """The full gradient of every parameter."""
    return {
        name: None if p.grad is None else whole({"": p.grad})[""]
        for name, p in model.named_parameters()
    }


def same(found: Any, expected: Any, within: float = 1e-10) -> None:
    """Compare nested results; tensors by the largest difference over the largest value."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        scale = max(1e-3, expected.abs().max().item()) if expected.numel() else 1.0
        error = (found - expected).abs().max().item() / scale if expected.numel() else 0.0
        assert error <= within, f"{error:.2e}"
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected)
        for name in expected:
            try:
                same(found[name], expected[name], within)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other, within)
    elif isinstance(expected, float):
        assert abs(found - expected) <= within * max(1.0, abs(expected)), (found, expected)
    else:
        assert found == expected


@dataclass(frozen=True)
class Here:
    """What a program gets: the engine, its rank, and a model of its own."""

    engine: ModuleType
    rank: int
    model: nn.Module


def run(
    engine: str, program: Callable[[Here], Any], size: int, build: Callable[[], nn.Module]
) -> list[Any]:
    """Results of ``program`` by rank."""
    model = build()
    models = [deepcopy(model) for _ in range(size)]
    return run_ranks(size, lambda rank: program(Here(ENGINES[engine], rank, models[rank])))


def alike(
    program: Callable[[Here], Any],
    size: int = 2,
    build: Callable[[], nn.Module] = lambda: seeded(Net()),
    within: float = 1e-10,
) -> list[Any]:
    """Run ``program`` under both engines; their results must be the same. Ours."""
    expected = run("torch", program, size, build)
    found = run("ours", program, size, build)
    same(found, expected, within)
    return found


def mean_gradients(
    model: nn.Module, losses: Sequence[Callable[[nn.Module], Tensor | None]]
) -> dict[str, Tensor | None]:
    """Gradients of the mean of several ranks' losses, in one process; None where there is none."""
    model.zero_grad()
    for loss in losses:
        value = loss(model)
        if value is not None:
            (value / len(losses)).backward()
    return gradients(model)
