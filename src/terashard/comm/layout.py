"""Which rank stands where among replicas, stages and shards, and which ranks share a group.

Ranks are numbered (replica, stage, shard), the shard axis fastest: shards exchange most, and
neighbours in rank usually share a node. With R replicas, P stages and W shards::

    rank = (replica · P + stage) · W + shard

      replica 0        shard 0   shard 1       shard_gather, shard_reduce: along a row
        stage 0           0 ───── 1            down, up, tie: along a column
                          │       │            replica: the same place in every replica
        stage 1           2 ───── 3            data: one stage of all replicas
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from terashard.errors import PlanError

GROUPS = ("world", "data", "shard_gather", "shard_reduce", "replica", "down", "up", "tie")
"""The groups of a mesh, in the order in which all ranks make them."""


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
            raise PlanError(
                f"{processes} processes were started, but {self.replicas} replicas x {self.stages}"
                f" stages x {self.shards} shards need {self.size}; start {self.size}, or change"
                " parallel.replicas, parallel.stages or parallel.shards"
            )

    def members(self, group: str, rank: int) -> tuple[int, ...]:
        """Global ranks of the group of this name around ``rank``, ascending."""
        at = self.coordinates(rank)
        match group:
            case "world":
                return tuple(range(self.size))
            case "data":
                return self._block(range(self.replicas), (at.stage,), range(self.shards))
            case "shard_gather" | "shard_reduce":
                return self._block((at.replica,), (at.stage,), range(self.shards))
            case "replica":
                return self._block(range(self.replicas), (at.stage,), (at.shard,))
            case "down" | "up":
                return self._block((at.replica,), range(self.stages), (at.shard,))
            case "tie":
                ends = sorted({0, self.stages - 1})
                return self._block((at.replica,), ends, (at.shard,))
            case _:
                raise ValueError(f"no group is called {group!r}; there are {', '.join(GROUPS)}")

    def _block(
        self, replicas: Iterable[int], stages: Iterable[int], shards: Iterable[int]
    ) -> tuple[int, ...]:
        return tuple(
            self.rank(Coordinates(replica, shard, stage))
            for replica, stage, shard in product(replicas, stages, shards)
        )
