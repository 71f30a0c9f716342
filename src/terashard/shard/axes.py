"""The ranks over which a unit is cut and summed, as ``shard`` sees them, whoever made the groups.

A pipeline's ``Mesh`` is one such set; ``DataAxes`` is the one of a module that is sharded by
itself, over a one- or two-dimensional ``DeviceMesh`` of torch.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from terashard.comm.group import Group
from terashard.schedule.actions import OVERS, Over


class Axes(Protocol):
    """Where the parameters of a unit go."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""

    @property
    def shards(self) -> int:
        """Ranks over which the unit is cut."""

    @property
    def shard(self) -> int:
        """This rank's place among them."""

    @property
    def replicas(self) -> int:
        """Ranks that hold the same rows."""

    @property
    def shard_gather(self) -> Group:
        """The shards, for completing parameters."""

    @property
    def shard_reduce(self) -> Group:
        """The shards, for summing gradients."""

    @property
    def replica(self) -> Group:
        """The ranks that hold the same rows."""

    @property
    def tie(self) -> Group | None:
        """The ranks of another stage that hold a copy of some parameter."""


def shared_axes(axes: Axes) -> set[Over]:
    """The sums that this rank takes with others."""
    groups = {"shard": axes.shard_reduce, "replica": axes.replica, "tie": axes.tie}
    return {over for over in OVERS if (group := groups[over]) is not None and group.size > 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAxes:
    """The groups of a module that is sharded by itself."""

    device: torch.device
    shard_gather: Group
    shard_reduce: Group
    replica: Group
    gather_handle: dist.ProcessGroup | None = None
    """torch's own group of the shards, if there are several; and the one for sums."""
    reduce_handle: dist.ProcessGroup | None = None

    @property
    def shards(self) -> int:
        """Ranks over which the unit is cut."""
        return self.shard_gather.size

    @property
    def shard(self) -> int:
        """This rank's place among them."""
        return self.shard_gather.rank

    @property
    def replicas(self) -> int:
        """Ranks that hold the same rows."""
        return self.replica.size

    @property
    def tie(self) -> None:
        """None: ties join stages of a pipeline."""
        return None
