"""The norm counts every gradient once; scaling reaches every gradient once."""

import pytest
import torch
from torch import nn

from terashard.comm.mesh import Mesh
from terashard.comm.threads import ThreadWorld, run_threads
from terashard.shard.clip import scale_gradients, squared_norm
from terashard.shard.cut import make_units
from terashard.shard.precision import Precision
from tests.shard.toys import Rank, assert_same, batch, reference


@pytest.mark.parametrize(("shards", "replicas"), [(1, 1), (2, 1), (3, 1), (2, 2), (3, 2)])
def test_the_norm_over_the_mesh_is_that_of_the_plain_model(shards: int, replicas: int) -> None:
    expected = sum(g.square().sum() for g in reference().values())

    def work(world: ThreadWorld, rank: int) -> None:
        here = Rank.of(world, rank, shards=shards)
        here.step(*batch(0))
        square = squared_norm(here.units, count_ties=True)
        if here.mesh.coordinates.replica:
            square.zero_()
        here.mesh.world.sum(square).wait()
        assert square.dtype is torch.float64
        assert square.item() == pytest.approx(expected.item(), rel=1e-13)

    run_threads(shards * replicas, work)


@pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25, dtype=torch.float64)])
def test_scaling_scales_the_public_gradients(factor: float | torch.Tensor) -> None:
    expected = {name: 0.25 * g for name, g in reference().items()}

    def work(world: ThreadWorld, rank: int) -> None:
        here = Rank.of(world, rank, shards=2)
        here.step(*batch(0))
        scale_gradients(here.units, factor)
        assert_same(here.reduced(), expected, 1e-12)

    run_threads(2, work)


def test_the_norm_of_a_long_float32_gradient_is_right_to_eight_digits() -> None:
    module = nn.Linear(300, 331)
    mesh = Mesh.of_threads(ThreadWorld(1), 0)
    (unit,) = make_units([("a", module)], mesh=mesh, precision=Precision(), ties={})
    unit.zero_gradients()
    generator = torch.Generator().manual_seed(3)
    rows = unit.gradients.rows[0]
    rows.copy_(torch.randn(rows.shape, generator=generator) * 1e-3)
    expected = rows.double().square().sum().item()
    assert squared_norm([unit], count_ties=True).item() == pytest.approx(expected, rel=1e-8)


def test_units_that_never_began_a_step_count_nothing() -> None:
    here = Rank.of(ThreadWorld(1), 0, shards=1)
    assert squared_norm(here.units, count_ties=True).item() == 0.0
    scale_gradients(here.units, 2.0)
    assert squared_norm([], count_ties=True).item() == 0.0


def test_a_gradient_that_is_not_finite_shows_in_the_norm() -> None:
    here = Rank.of(ThreadWorld(1), 0, shards=1)
    here.step(*batch(0))
    here.units[1].gradients.rows[0][0] = float("nan")
    assert squared_norm(here.units, count_ties=True).isnan()
