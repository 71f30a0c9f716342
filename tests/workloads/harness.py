"""A workload is trained twice: sharded over ranks, and in one process on the mean of their losses.

After every step the two must agree in all gradients, their norm, all parameters, and the buffers of
each rank, in float64. A gradient that no rank made is missing in both, so an optimizer leaves the
parameter alone. In one process every rank has a copy of the modules that shares the parameters and
has buffers of its own, which is what data parallelism without synchronised buffers means.

A program runs under torch's engine too where that can run it: so the tests themselves are tested.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.helpers.torch_threads import run_ranks
from tests.shard.engines import ENGINES, mesh_of, same, whole

WITHIN = 1e-12
"""Of the largest value of a tensor; measured: at most 1e-13 in any workload."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Whose engine, over which mesh, and whether units are kept after forward."""

    engine: str = "ours"
    shape: tuple[int, ...] = (2,)
    keep: bool = False

    def __str__(self) -> str:
        ranks = "x".join(map(str, self.shape))
        return f"{self.engine}-{ranks}{'-kept' * self.keep}"


OURS = (Layout(), Layout(shape=(3,), keep=True))
REPLICAS = Layout(shape=(2, 2))
TORCH = Layout(engine="torch")


def over(*layouts: Layout) -> Callable[[Any], Any]:
    """Run a test, of (optimizer, layout), with both optimizers over every layout."""

    def mark(test: Any) -> Any:
        test = pytest.mark.parametrize("layout", layouts, ids=str)(test)
        return pytest.mark.parametrize("optimizer", list(OPTIMIZERS))(test)

    return mark


@dataclass(frozen=True)
class Sharder:
    """``fully_shard`` of one layout, on this rank."""

    layout: Layout
    mesh: DeviceMesh

    @property
    def engine(self) -> ModuleType:
        return ENGINES[self.layout.engine]

    def __call__(self, module: Any, **options: Any) -> None:
        reshard = False if self.layout.keep else None
        self.engine.fully_shard(module, mesh=self.mesh, reshard_after_forward=reshard, **options)


Shard = Callable[[list[Any], Sharder], None]
Loss = Callable[[Any, int, int], Tensor]
"""Of the models as a rank has them (the model, if there is one), the rank, and the step."""


@dataclass
class Run:
    """One training run: of one rank of several, or of one process for all of them."""

    replicas: dict[int, list[Any]]
    """The models of every rank whose loss is computed here: the same parameters, other buffers."""
    optimizer: str
    steps: int = 0
    told: list[Any] = field(default_factory=list)
    buffers: dict[int, list[Any]] = field(default_factory=dict)
    parameters: dict[str, nn.Parameter] = field(init=False)
    """By name, as an optimizer has them: a module that is gathered holds others meanwhile."""

    def __post_init__(self) -> None:
        self.parameters = {
            f"{index}.{name}" if len(self.models) > 1 else name: parameter
            for index, model in enumerate(self.models)
            for name, parameter in model.named_parameters()
        }

    @property
    def models(self) -> list[Any]:
        """The models of one of the ranks here."""
        return next(iter(self.replicas.values()))

    def optimizer_of(self, parameters: Any) -> torch.optim.Optimizer:
        """A new optimizer."""
        return OPTIMIZERS[self.optimizer](list(parameters))

    def step(
        self,
        loss: Loss,
        *optimizers: torch.optim.Optimizer,
        before: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """One step on the mean of the losses; ``before`` the optimizers, gradients may be changed.

        Returns which parameters have a gradient.
        """
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank, models in self.replicas.items():
            value = loss(models[0] if len(models) == 1 else models, rank, self.steps)
            torch.autograd.backward(value / len(self.replicas))
        made = {n: _dense(p.grad) for n, p in self.parameters.items() if p.grad is not None}
        self.told += [whole(made), _norm(made.values())]
        before()
        for optimizer in optimizers:
            optimizer.step()
        self.tell()
        self.steps += 1
        return list(made)

    def tell(self) -> None:
        """Note all parameters, and the buffers of each rank."""
        self.told.append(whole(self.parameters))
        for rank, models in self.replicas.items():
            kept = self.buffers.setdefault(rank, [])
            kept += [whole(dict(model.named_buffers())) for model in models]


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _norm(gradients: Iterable[Tensor]) -> float:
    """As torch's clipping has it, whatever the placements."""
    norm = torch.nn.utils.get_total_norm(gradients)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def units(*inner: Callable[[Any], Sequence[Any]]) -> Shard:
    """Shard what each function chooses of the model at its place, then the model."""

    def shard(models: list[Any], fully_shard: Sharder) -> None:
        for model, choose in zip(models, inner, strict=True):
            for module in choose(model):
                fully_shard(module)
            fully_shard(model)

    return shard


def equal_to_one_process(
    build: Callable[[], list[Any]],
    shard: Shard,
    train: Callable[[Run], None],
    optimizer: str,
    layout: Layout,
) -> None:
    """Train both ways and compare all that was told."""
    models = build()
    ranks = range(torch.Size(layout.shape).numel())
    sharded = [deepcopy(models) for _ in ranks]
    plain = Run({rank: _sharing_parameters(models) for rank in ranks}, optimizer)
    train(plain)

    def work(rank: int) -> Run:
        shard(sharded[rank], Sharder(layout, mesh_of(*layout.shape)))
        run = Run({rank: sharded[rank]}, optimizer)
        train(run)
        return run

    for rank, run in enumerate(run_ranks(len(ranks), work)):
        assert plain.told, "a workload that tells nothing claims nothing"
        same(run.told, plain.told, WITHIN)
        same(run.buffers[rank], plain.buffers[rank], WITHIN)


def _sharing_parameters(models: list[Any]) -> list[Any]:
    return deepcopy(models, {id(p): p for model in models for p in model.parameters()})


def assign(parameter: Tensor, value: Tensor) -> None:
    """Let ``parameter``, of whatever placement, have the full ``value``."""
    with torch.no_grad():
        parameter.copy_(placed_as(parameter, value))


def placed_as(parameter: Tensor, value: Tensor) -> Tensor:
    """The full ``value``, which every rank has, placed as ``parameter`` is."""
    if not isinstance(parameter, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def noise(seed: int, *shape: int) -> Tensor:
    """Normal numbers in float64 that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
