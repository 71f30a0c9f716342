"""How a process joins the others: torch.distributed's process groups for every group of a mesh.

All ranks make all groups of all ranks in the same order, as torch.distributed demands; a group that
a rank is no member of costs it microseconds. The group of all ranks is torch's default group,
which also serves ``data`` if there is one stage. Groups of one member are made for the device mesh
only.
"""

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh

from terashard.comm.collectives import maker_of
from terashard.comm.layout import GROUPS, Layout
from terashard.comm.process import DistributedGroup, explained


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicators:
    """The process groups of one rank, by the name of the mesh's group."""

    layout: Layout
    rank: int
    device: torch.device
    owned: bool
    """Whether torch.distributed was started here."""
    handles: dict[str, dist.ProcessGroup] = field(default_factory=dict)

    def group(self, name: str, ranks: tuple[int, ...]) -> DistributedGroup:
        """The group ``name``, whose members are the global ``ranks``."""
        handle = self.handles[name]
        return maker_of(handle)(handle, ranks, name)

    def device_mesh(self) -> DeviceMesh:
        """All ranks as a mesh of ("replica", "stage", "shard"), on the same process groups."""
        layout = self.layout
        return DeviceMesh.from_group(
            [self.handles[name] for name in _AXES],
            self.device.type,
            mesh=torch.arange(layout.size).view(layout.replicas, layout.stages, layout.shards),
            mesh_dim_names=("replica", "stage", "shard"),
        )


_AXES = ("replica", "down", "shard_gather")
"""Groups that serve torch's mesh, and are made even for one member."""


def join(layout: Layout, device: torch.device, timeout: float) -> Communicators:
    """Meet the other processes (unless that was done before) and make every group."""
    device = _local(device)
    owned = not dist.is_initialized()
    if owned:
        layout.require(int(os.environ.get("WORLD_SIZE", "1")))
        _meet(device, timeout)
    layout.require(dist.get_world_size())
    rank = dist.get_rank()
    joined = Communicators(layout=layout, rank=rank, device=device, owned=owned)
    for name in GROUPS:
        with explained(f"rank {rank}: making the groups {name!r}"):
            _make(joined, name, timedelta(seconds=timeout))
    return joined


def _meet(device: torch.device, timeout: float) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    wait = timedelta(seconds=timeout)
    rank = os.environ.get("RANK", "0")
    with explained(f"rank {rank}: meeting the other processes within {timeout:g} s"):
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=wait)
        else:
            alone = HashStore()
            dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=wait)


def _local(device: torch.device) -> torch.device:
    """The device of this process: GPU number LOCAL_RANK, if it is a GPU without a number."""
    if device.type != "cuda":
        return device
    if str(device) == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _make(joined: Communicators, name: str, timeout: timedelta) -> None:
    """Make the groups ``name`` of all ranks; keep this rank's."""
    made: set[tuple[int, ...]] = set()
    for rank in range(joined.layout.size):
        ranks = joined.layout.members(name, rank)
        if ranks in made:
            continue
        made.add(ranks)
        handle = _handle(joined.layout, name, ranks, timeout)
        if handle is not None and joined.rank in ranks:
            joined.handles[name] = handle


def _handle(
    layout: Layout, name: str, ranks: tuple[int, ...], timeout: timedelta
) -> dist.ProcessGroup | None:
    if name in ("world", "data") and len(ranks) == layout.size:
        return dist.group.WORLD
    if len(ranks) == 1 and name not in _AXES:
        return None
    made: dist.ProcessGroup | None = dist.new_group(list(ranks), timeout=timeout, group_desc=name)
    return made
