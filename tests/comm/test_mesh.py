import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from terashard.comm.layout import GROUPS, Coordinates
from terashard.comm.mesh import Mesh
from terashard.comm.pieces import rows_of
from terashard.errors import PlanError
from tests.helpers.processes import run_processes
from tests.helpers.threads import run_mesh

SHAPE = (5, 3)


def whole(stage: int) -> Tensor:
    generator = torch.Generator().manual_seed(stage)
    return torch.randn(SHAPE, generator=generator)


def parameter(mesh: Mesh, full: Tensor) -> DTensor:
    """This rank's rows of ``full`` as a DTensor."""
    rows = rows_of(full, mesh.shards, mesh.coordinates.shard).clone()
    placements = [Replicate(), Shard(0)]
    return DTensor.from_local(
        rows, mesh.device_mesh, placements, run_check=False, shape=SHAPE, stride=full.stride()
    )


def every_group_reaches_its_members(mesh: Mesh) -> None:
    for name in GROUPS:
        group = getattr(mesh, name)
        ranks = mesh.layout.members(name, mesh.rank)
        if name == "tie" and (mesh.stages == 1 or mesh.rank not in ranks):
            assert group is None
            continue
        assert group.ranks == ranks
        assert group.ranks[group.rank] == mesh.rank
        total = torch.tensor([float(mesh.rank)])
        group.sum(total).wait()
        assert total.item() == sum(ranks), name


def the_device_mesh_is_the_stage(mesh: Mesh) -> None:
    at = mesh.coordinates
    assert mesh.device_mesh.mesh_dim_names == ("replica", "shard")
    assert tuple(mesh.device_mesh.get_coordinate() or ()) == (at.replica, at.shard)
    assert mesh.device_mesh.mesh.flatten().tolist() == list(mesh.layout.members("data", mesh.rank))
    assert mesh.device_mesh.shape == (mesh.replicas, mesh.shards)


def optimizers_step_on_shards(mesh: Mesh) -> None:
    full, grad = whole(mesh.coordinates.stage), whole(90)
    for make in (
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ):
        ours, witness = nn.Parameter(parameter(mesh, full)), nn.Parameter(full.clone())
        ours.grad, witness.grad = parameter(mesh, grad), grad.clone()
        for p in (ours, witness):
            optimizer = make([p])
            optimizer.step()
            optimizer.step()
        expected = rows_of(witness, mesh.shards, mesh.coordinates.shard)
        assert torch.equal(ours.data.to_local(), expected)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("replicas", "shards", "stages"), [(1, 1, 1), (2, 2, 3), (1, 3, 2)])
def test_every_rank_of_a_mesh_of_threads_finds_its_groups(
    replicas: int, shards: int, stages: int
) -> None:
    def run(mesh: Mesh) -> Coordinates:
        every_group_reaches_its_members(mesh)
        the_device_mesh_is_the_stage(mesh)
        return mesh.coordinates

    found = run_mesh(run, replicas=replicas, shards=shards, stages=stages)
    assert len(set(found)) == replicas * shards * stages


def test_dtensors_and_optimizers_live_on_a_mesh_of_threads() -> None:
    run_mesh(optimizers_step_on_shards, replicas=2, shards=2, stages=2)


def test_gather_and_reduce_do_not_share_a_communicator() -> None:
    def run(mesh: Mesh) -> None:
        pairs = [(mesh.shard_gather, torch.ones(1)), (mesh.shard_reduce, torch.ones(2))]
        if mesh.rank == 1:  # one communicator would see two orders of collectives
            pairs.reverse()
        works = [group.sum(tensor) for group, tensor in pairs]
        for work in works:
            work.wait()

    run_mesh(run, shards=2)


def test_a_mesh_that_does_not_fit_its_world_is_refused() -> None:
    with pytest.raises(PlanError, match=r"1 processes were started, but .* need 2"):
        Mesh.of_processes(stages=2)


def _everything(rank: int) -> str:
    mesh = Mesh.of_processes(replicas=1, shards=2, stages=2, timeout=30)
    assert mesh.rank == rank
    assert not mesh.owns_processes
    every_group_reaches_its_members(mesh)
    the_device_mesh_is_the_stage(mesh)
    optimizers_step_on_shards(mesh)
    full = whole(mesh.coordinates.stage)
    assert torch.equal(parameter(mesh, full).full_tensor(), full)
    with pytest.raises(PlanError, match=r"4 processes were started, but .* need 6"):
        Mesh.of_processes(shards=3, stages=2)
    mesh.close()  # not its own: the helper ends it
    return str(mesh)


@pytest.mark.processes
def test_a_mesh_of_processes_does_the_same_and_gathers_full_tensors() -> None:
    assert run_processes(4, _everything) == [
        "rank 0 (replica 0, stage 0, shard 0)",
        "rank 1 (replica 0, stage 0, shard 1)",
        "rank 2 (replica 0, stage 1, shard 0)",
        "rank 3 (replica 0, stage 1, shard 1)",
    ]
