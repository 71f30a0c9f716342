"""A workload is trained twice: sharded over ranks, and plainly on the mean of the ranks' losses.

Parameters and gradient norms must be the same after every step, in float64, with SGD and with Adam.
A parameter that no rank used has no gradient in either, so the optimizer leaves it alone.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terashard
from tests.helpers.torch_threads import run_ranks
from tests.shard.engines import gradients, mesh_of, same, whole

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}

both_optimizers = pytest.mark.parametrize("optimizer", list(OPTIMIZERS))


@dataclass
class Run:
    """One training run: of one rank of several, or of one process for all of them."""

    models: list[Any]
    ranks: list[int]
    """The ranks whose losses this process computes."""
    optimizer: str
    told: list[Any] = field(default_factory=list)

    def optimizer_of(self, parameters: Any) -> torch.optim.Optimizer:
        """A new optimizer."""
        return OPTIMIZERS[self.optimizer](list(parameters))

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[int], Tensor],
        *,
        model: nn.Module | None = None,
    ) -> None:
        """One step on the mean of the losses; ``model``'s gradient norm is told."""
        optimizer.zero_grad()
        for rank in self.ranks:
            (loss(rank) / len(self.ranks)).backward()
        self.tell_norm(model or self.models[0])
        optimizer.step()

    def tell_norm(self, model: nn.Module) -> None:
        """Note the norm of all gradients, and who has one."""
        found = {n: g for n, g in gradients(model).items() if g is not None}
        squares = [g.abs().square().sum().item() for g in found.values()]
        self.told.append((sum(squares) ** 0.5, sorted(found)))


Train = Callable[[Run], None]
Shard = Callable[[list[Any], Any], None]


def units(*inner: Callable[[Any], Sequence[nn.Module]]) -> Shard:
    """Shard what each function chooses of the model at its place, then the model."""

    def shard(models: list[Any], mesh: Any) -> None:
        for model, choose in zip(models, inner, strict=True):
            for module in choose(model):
                terashard.fully_shard(module, mesh=mesh)
            terashard.fully_shard(model, mesh=mesh)

    return shard


def equal_to_one_process(
    build: Callable[[], list[Any]],
    shard: Shard,
    train: Train,
    optimizer: str,
    *,
    shape: tuple[int, ...] = (2,),
    within: float = 1e-9,
) -> None:
    """Train both ways and compare everything told and all values in the end."""
    size = torch.Size(shape).numel()
    models = build()
    copies = [deepcopy(models) for _ in range(size)]

    def rank(index: int) -> Any:
        shard(copies[index], mesh_of(*shape))
        run = Run(copies[index], [index], optimizer)
        train(run)
        return run.told, [whole(model.state_dict()) for model in run.models]

    plain = Run(models, list(range(size)), optimizer)
    train(plain)
    expected = plain.told, [whole(model.state_dict()) for model in plain.models]
    for found in run_ranks(size, rank):
        same(found, expected, within)


def noise(seed: int, *shape: int) -> Tensor:
    """Normal numbers in float64 that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
