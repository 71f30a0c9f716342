"""torch.optim on the public parameters: steps, norms and clipping equal those of one process."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from terashard.comm.mesh import Mesh
from terashard.comm.threads import ThreadWorld, run_threads
from terashard.shard.clip import scale_gradients, squared_norm
from terashard.shard.cut import make_units, named_parameters
from tests.shard.toys import (
    FLOAT64,
    Rank,
    assert_same,
    batch,
    loss_of,
    named_modules,
    parameters_of,
)

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
}
LAYOUTS = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (3, 2)]
STEPS = 4
CLIP = 2.0


def trainable(parameters: dict[str, nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters.values() if p.requires_grad]


def plain(make: Optimizer, *, tied: bool = False) -> tuple[dict[str, Tensor], list[float]]:
    """Values after the steps of one process, and the norm of every step before clipping."""
    named = named_modules(tied=tied)
    parameters = parameters_of(named)
    optimizer = make(trainable(parameters))
    norms = []
    for step in range(STEPS):
        for p in trainable(parameters):
            p.grad = torch.zeros_like(p)
        loss_of([module for _, module in named], *batch(step)).backward()
        norms.append(nn.utils.clip_grad_norm_(trainable(parameters), CLIP).item())
        optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}, norms


def clip(mesh: Mesh, square: Tensor, scale: Callable[[float], None]) -> float:
    """The norm over the mesh; gradients are scaled as torch's clipping scales them."""
    if mesh.coordinates.replica:
        square = torch.zeros_like(square)
    mesh.world.sum(square).wait()
    norm = square.sqrt().item()
    scale(min(1.0, CLIP / (norm + 1e-6)))
    return norm


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("shards", "replicas"), LAYOUTS)
def test_steps_match_one_process(name: str, shards: int, replicas: int) -> None:
    values, norms = plain(OPTIMIZERS[name])
    assert min(norms) < CLIP < max(norms)  # both ways are taken

    def work(world: ThreadWorld, rank: int) -> None:
        here = Rank.of(world, rank, shards=shards)
        optimizer = OPTIMIZERS[name](trainable(named_parameters(here.units)))
        for step in range(STEPS):
            here.step(*batch(step))
            square = squared_norm(here.units, count_ties=True)
            norm = clip(here.mesh, square, lambda factor: scale_gradients(here.units, factor))
            assert norm == pytest.approx(norms[step], rel=1e-12)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        assert_same(here.values(), values, 1e-12)

    run_threads(shards * replicas, work)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_parameter_shared_by_two_units_steps_as_one(shards: int) -> None:
    values, norms = plain(OPTIMIZERS["adamw"], tied=True)

    def work(world: ThreadWorld, rank: int) -> None:
        here = Rank.of(world, rank, shards=shards, tied=True)
        optimizer = OPTIMIZERS["adamw"](trainable(named_parameters(here.units)))
        for step in range(STEPS):
            here.step(*batch(step))
            square = squared_norm(here.units, count_ties=True)
            norm = clip(here.mesh, square, lambda factor: scale_gradients(here.units, factor))
            assert norm == pytest.approx(norms[step], rel=1e-12)
            optimizer.step()
        assert_same(here.values(), values, 1e-12)

    run_threads(shards, work)


class Stage:
    """Half of the tied model: first and middle, or again and last, which share a weight."""

    NAMES = ("middle.linear.weight", "again.linear.weight")

    def __init__(self, world: ThreadWorld, rank: int, shards: int, replicas: int) -> None:
        self.mesh = Mesh.of_threads(world, rank, shards=shards, replicas=replicas, stages=2)
        self.index = self.mesh.coordinates.stage
        named = named_modules(tied=True)
        if self.index:
            named[2][1].linear.weight = nn.Parameter(named[2][1].linear.weight.detach().clone())
        self.named = named[2:] if self.index else named[:2]
        ties = dict([self.NAMES[::-1] if self.index else self.NAMES])
        self.units = make_units(self.named, mesh=self.mesh, precision=FLOAT64, ties=ties)
        self.tied_unit = self.units[0] if self.index else self.units[1]

    def step(self, x: Tensor, y: Tensor) -> None:
        for unit in self.units:
            unit.gather()
            unit.wait()
            unit.zero_gradients()
        data = self.mesh.data
        self.run(x.chunk(data.size)[data.rank], y.chunk(data.size)[data.rank])
        for unit in self.units:
            unit.release()
            unit.reduce("shard")
            unit.reduce("replica")
        self.tied_unit.reduce("tie")
        for unit in self.units:
            unit.wait_reduced()

    def run(self, x: Tensor, y: Tensor) -> None:
        modules = [module for _, module in self.named]
        joint = torch.empty(len(x), 7, dtype=torch.float64)
        if self.index:
            self.mesh.down.receive(joint, 0).wait()
            loss_of(modules, joint.requires_grad_(), y).backward()
            self.mesh.up.send(joint.grad, 0).wait()
        else:
            out = modules[1](modules[0](x))
            self.mesh.down.send(out.detach(), 1).wait()
            self.mesh.up.receive(joint, 1).wait()
            out.backward(joint)


@pytest.mark.parametrize(("shards", "replicas"), [(1, 1), (2, 1), (2, 2)])
def test_a_weight_tied_across_two_stages_steps_as_one(shards: int, replicas: int) -> None:
    """Both stages hold the sum of both gradients, and the norm counts it once."""
    values, norms = plain(OPTIMIZERS["adamw"], tied=True)

    def work(world: ThreadWorld, rank: int) -> None:
        stage = Stage(world, rank, shards, replicas)
        optimizer = OPTIMIZERS["adamw"](trainable(named_parameters(stage.units)))
        for step in range(STEPS):
            stage.step(*batch(step))
            square = squared_norm(stage.units, count_ties=stage.index == 0)
            norm = clip(stage.mesh, square, lambda factor: scale_gradients(stage.units, factor))
            assert norm == pytest.approx(norms[step], rel=1e-12)
            optimizer.step()
        found = Rank(stage.mesh, stage.named, stage.units).values()
        expected = values | {"again.linear.weight": values["middle.linear.weight"]}
        assert_same(found, {name: expected[name] for name in found}, 1e-12)

    run_threads(2 * shards * replicas, work)
