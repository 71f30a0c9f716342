"""The same claims over real gloo processes, whose DTensors have a backend."""

import pytest
import torch
from torch import Tensor

from terashard.comm.mesh import Mesh
from terashard.shard.clip import squared_norm
from terashard.shard.cut import copied_parameters, named_parameters
from tests.helpers.processes import run_processes
from tests.shard.test_optimizers import OPTIMIZERS, STEPS, trainable
from tests.shard.toys import (
    Rank,
    assert_same,
    batch,
    loss_of,
    named_modules,
    parameters_of,
    reference,
)


def train(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """First gradients, last values, and the first norm, of one of three shards."""
    torch.set_num_threads(1)
    here = Rank.on(Mesh.of_processes(shards=3))
    public = named_parameters(here.units)
    optimizer = OPTIMIZERS["adamw"](trainable(public))
    here.step(*batch(0))
    gradients = here.reduced()
    square = squared_norm(here.units, count_ties=True)
    here.mesh.world.sum(square).wait()
    for step in range(STEPS):
        here.step(*batch(step))
        optimizer.step()
        optimizer.zero_grad()
    whole = {name: p.full_tensor().detach() for name, p in public.items()}
    for name, copied in copied_parameters(here.units).items():
        assert torch.equal(copied.full_tensor(), whole[name])
    return gradients, whole, square.item()


def unclipped() -> dict[str, Tensor]:
    """Values after the same steps of one process."""
    named = named_modules()
    parameters = parameters_of(named)
    optimizer = OPTIMIZERS["adamw"](trainable(parameters))
    for step in range(STEPS):
        for p in trainable(parameters):
            p.grad = torch.zeros_like(p)
        loss_of([module for _, module in named], *batch(step)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}


@pytest.mark.processes
def test_three_gloo_processes_step_as_one() -> None:
    expected = unclipped()
    square = sum(g.square().sum() for g in reference().values())
    for found, whole, norm in run_processes(3, train):
        assert_same(found, reference(), 1e-12)
        assert_same(whole, expected, 1e-12)
        assert norm == pytest.approx(square.item(), rel=1e-12)
