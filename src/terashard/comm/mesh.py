"""One rank's place among replicas, stages and shards, and the groups it exchanges tensors with.

``Mesh.of_threads`` serves ranks that are threads of one process, ``Mesh.of_processes`` ranks that
are processes of ``torch.distributed``. What is built on a mesh cannot tell which it was.

Every group of a kind that runs beside others has a communicator of its own: activations go down
while gradients go up, and the next unit is gathered while the last one is reduced.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from terashard.comm.alone import AloneGroup
from terashard.comm.group import Group
from terashard.comm.join import join
from terashard.comm.layout import GROUPS, Coordinates, Layout
from terashard.comm.threads import ThreadWorld

AXES = ("replica", "shard")
"""Names of the axes of ``Mesh.device_mesh``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """One rank's place and groups. A group of one member has no communicator and costs nothing."""

    layout: Layout
    rank: int
    """Global rank."""
    device: torch.device
    """Where this rank computes."""
    device_mesh: DeviceMesh
    """("replica", "shard") over the ranks of this stage: where its parameters are DTensors with
    placements [Replicate(), Shard(0)]."""
    world: Group
    """All ranks."""
    data: Group
    """All ranks of this stage: the data-parallel ranks."""
    shard_gather: Group
    """The shards of this stage and replica, for completing parameters."""
    shard_reduce: Group
    """The same ranks with a communicator of its own, for summing gradients."""
    replica: Group
    """The ranks that hold the same rows of the same stage."""
    down: Group
    """The stages of this replica and shard, for activations; the position is the stage."""
    up: Group
    """The same ranks with a communicator of its own, for gradients."""
    tie: Group | None
    """First and last stage of this replica and shard; None on the stages between, or if alone."""

    owns_processes: bool = False
    """Whether making this mesh started torch.distributed."""

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank stands."""
        return self.layout.coordinates(self.rank)

    @property
    def replicas(self) -> int:
        """Copies of the whole sharded pipeline."""
        return self.layout.replicas

    @property
    def shards(self) -> int:
        """Ranks over which a stage is cut."""
        return self.layout.shards

    @property
    def shard(self) -> int:
        """This rank's place among the shards of its stage."""
        return self.coordinates.shard

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.layout.stages

    def __str__(self) -> str:
        return self.name_of(self.rank)

    def name_of(self, rank: int) -> str:
        """``rank`` with its coordinates, as messages name it."""
        return f"rank {rank} ({self.layout.coordinates(rank)})"

    def close(self) -> None:
        """End torch.distributed, if it was this mesh that started it."""
        if self.owns_processes and dist.is_initialized():
            dist.destroy_process_group()

    @classmethod
    def of_threads(
        cls, world: ThreadWorld, rank: int, *, replicas: int = 1, shards: int = 1, stages: int = 1
    ) -> "Mesh":
        """The mesh of a rank that is a thread; its ``device_mesh`` has no process groups."""
        layout = Layout(replicas=replicas, shards=shards, stages=stages)
        layout.require(world.size)
        members = torch.tensor(layout.members("data", rank)).view(replicas, shards)
        device_mesh = DeviceMesh(
            "cpu", members, mesh_dim_names=AXES, _init_backend=False, _rank=rank
        )
        groups = _groups(layout, rank, lambda name, ranks: world.group(rank, ranks, name))
        return cls(
            layout=layout,
            rank=rank,
            device=torch.device("cpu"),
            device_mesh=device_mesh,
            **groups,
        )

    @classmethod
    def of_processes(
        cls,
        *,
        replicas: int = 1,
        shards: int = 1,
        stages: int = 1,
        device: str | torch.device = "cpu",
        timeout: float = 120.0,
    ) -> "Mesh":
        """The mesh of this process among those that torchrun (or the caller) started.

        ``timeout`` is how many seconds a rank waits for another. Raises ``PlanError`` if the run
        has more or fewer processes than the mesh has ranks.
        """
        layout = Layout(replicas=replicas, shards=shards, stages=stages)
        joined = join(layout, torch.device(device), timeout)
        return cls(
            layout=layout,
            rank=joined.rank,
            device=joined.device,
            device_mesh=joined.device_mesh()[AXES],
            owns_processes=joined.owned,
            **_groups(layout, joined.rank, joined.group),
        )


def _groups(
    layout: Layout, rank: int, make: Callable[[str, tuple[int, ...]], Group]
) -> dict[str, Any]:
    groups: dict[str, Any] = {}
    for name in GROUPS:
        ranks = layout.members(name, rank)
        if name == "tie" and (layout.stages == 1 or rank not in ranks):
            groups[name] = None
        else:
            groups[name] = AloneGroup(rank) if len(ranks) == 1 else make(name, ranks)
    return groups
