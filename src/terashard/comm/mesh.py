"""Where one rank stands among replicas, stages and shards, and the groups it exchanges tensors with.

Ranks are numbered (replica, stage, shard), the shard axis fastest: shards exchange most, and neighbours in rank
usually share a node. With R replicas, P stages and W shards::

    rank = (replica · P + stage) · W + shard

      replica 0            shard 0   shard 1        gather, reduce: along a row of shards
        stage 0               0 ───── 1             down, up, tie: along a column of stages
                              │       │             replica: the same place in every replica
        stage 1               2 ───── 3             data: all ranks of one stage
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from terashard.comm.alone import AloneGroup
from terashard.comm.group import Group
from terashard.comm.threads import ThreadWorld
from terashard.errors import PlanError


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a rank stands on each axis."""

    replica: int
    shard: int
    stage: int

    def __str__(self) -> str:
        return f"replica {self.replica}, stage {self.stage}, shard {self.shard}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many replicas, shards and stages there are, and which rank is where."""

    replicas: int = 1
    shards: int = 1
    stages: int = 1

    def __post_init__(self) -> None:
        """Refuse empty axes."""
        for name in ("replicas", "shards", "stages"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.replicas * self.shards * self.stages

    def rank(self, at: Coordinates) -> int:
        """Global rank of the coordinates ``at``."""
        return (at.replica * self.stages + at.stage) * self.shards + at.shard

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of the global rank ``rank``."""
        rest, shard = divmod(rank, self.shards)
        replica, stage = divmod(rest, self.stages)
        return Coordinates(replica, shard, stage)

    def require(self, processes: int) -> None:
        """Refuse any other number of processes than that of the ranks."""
        if processes != self.size:
            more = "more" if processes > self.size else "fewer"
            raise PlanError(
                f"{processes} processes run, {more} than the {self.size} = {self.replicas} replicas"
                f" x {self.stages} stages x {self.shards} shards of the plan; start {self.size} processes,"
                " or change parallel.replicas, parallel.stages or parallel.shards"
            )

    def shard_ranks(self, rank: int) -> tuple[int, ...]:
        """The shards of ``rank``'s stage and replica."""
        at = self.coordinates(rank)
        return tuple(
            self.rank(Coordinates(at.replica, shard, at.stage)) for shard in range(self.shards)
        )

    def replica_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same rows of the same stage."""
        at = self.coordinates(rank)
        return tuple(
            self.rank(Coordinates(replica, at.shard, at.stage)) for replica in range(self.replicas)
        )

    def data_ranks(self, rank: int) -> tuple[int, ...]:
        """All ranks of ``rank``'s stage, replica by replica."""
        at = self.coordinates(rank)
        return tuple(
            self.rank(Coordinates(replica, shard, at.stage))
            for replica in range(self.replicas)
            for shard in range(self.shards)
        )

    def pipeline_ranks(self, rank: int) -> tuple[int, ...]:
        """The stages of ``rank``'s replica and shard, first to last."""
        at = self.coordinates(rank)
        return tuple(
            self.rank(Coordinates(at.replica, at.shard, stage)) for stage in range(self.stages)
        )

    def tie_ranks(self, rank: int) -> tuple[int, ...]:
        """First and last stage of ``rank``'s replica and shard."""
        pipeline = self.pipeline_ranks(rank)
        return (pipeline[0], pipeline[-1]) if self.stages > 1 else pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """One rank's place and groups. An axis of extent 1 has a group of one member, which costs nothing."""

    layout: Layout
    rank: int
    """Global rank."""
    device: torch.device
    """Where this rank computes."""
    device_mesh: DeviceMesh
    """("replica", "shard") over the ranks of this stage: parameters are DTensors [Replicate(), Shard(0)] on it."""
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
    """First and last stage of this replica and shard; None for one stage, and for the stages between."""

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
    def stages(self) -> int:
        """Pipeline stages."""
        return self.layout.stages

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.coordinates})"

    @classmethod
    def of_threads(
        cls, world: ThreadWorld, rank: int, *, replicas: int = 1, shards: int = 1, stages: int = 1
    ) -> "Mesh":
        """The mesh of a rank that lives in a thread; its ``device_mesh`` has no backend of torch.distributed."""
        layout = Layout(replicas=replicas, shards=shards, stages=stages)
        layout.require(world.size)
        groups: dict[str, Group | None] = {}
        for name, ranks in group_ranks(layout, rank):
            groups[name] = _thread_group(world, rank, name, ranks)
        members = torch.tensor(layout.data_ranks(rank)).view(replicas, shards)
        device_mesh = DeviceMesh(
            "cpu", members, mesh_dim_names=("replica", "shard"), _init_backend=False, _rank=rank
        )
        return cls(
            layout=layout,
            rank=rank,
            device=torch.device("cpu"),
            device_mesh=device_mesh,
            **groups,  # type: ignore[arg-type]  # the names are those of group_ranks
        )


def group_ranks(layout: Layout, rank: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and global ranks of every group that ``rank`` may be in, in the order in which all ranks make them."""
    yield "world", tuple(range(layout.size))
    yield "data", layout.data_ranks(rank)
    yield "shard_gather", layout.shard_ranks(rank)
    yield "shard_reduce", layout.shard_ranks(rank)
    yield "replica", layout.replica_ranks(rank)
    yield "down", layout.pipeline_ranks(rank)
    yield "up", layout.pipeline_ranks(rank)
    yield "tie", layout.tie_ranks(rank)


def _thread_group(world: ThreadWorld, rank: int, name: str, ranks: tuple[int, ...]) -> Group | None:
    if name == "tie" and (len(ranks) == 1 or rank not in ranks):
        return None
    return AloneGroup(rank) if len(ranks) == 1 else world.group(rank, ranks, name)
