"""Over which ranks a module is sharded by itself.

A one-dimensional ``DeviceMesh`` cuts every parameter over all its ranks; a two-dimensional one cuts
over the second axis and replicates over the first. Gathers and reductions get a process group each,
made once for every group of shards.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.tensor import Placement, Replicate
from torch.utils.weak import WeakIdKeyDictionary

from terashard.comm.alone import AloneGroup
from terashard.comm.collectives import group_over, twin_of
from terashard.comm.group import Group
from terashard.shard.axes import DataAxes

_SMALLER = WeakIdKeyDictionary()
"""By mesh and number of ranks: groups of so many."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataMesh:
    """The data-parallel ranks of one ``fully_shard`` call.

    ``mesh`` has the data axes only: (replicate, shard), or one of the two. With ``dims``, which
    names them, parameters are DTensors on a larger mesh already.
    """

    mesh: DeviceMesh
    shard_axis: int | None
    replicate_axis: int | None
    dims: DataParallelMeshDims | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> "DataMesh":
        """Read ``mesh`` as torch does; ``ValueError`` if it cannot be."""
        if dims is not None:
            return cls._of_named(mesh, dims)
        if mesh.ndim not in (1, 2):
            raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
        if mesh.ndim == 1:
            return cls(mesh=mesh, shard_axis=0, replicate_axis=None)
        if mesh.mesh_dim_names is None:
            raise ValueError(
                "a 2D mesh, (replicate, shard), needs names; give mesh_dim_names to"
                " init_device_mesh"
            )
        return cls(mesh=mesh, shard_axis=1, replicate_axis=0)

    @classmethod
    def _of_named(cls, mesh: DeviceMesh, dims: DataParallelMeshDims) -> "DataMesh":
        known = mesh.mesh_dim_names
        if known is None:
            raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
        for name in (*dims.shard_names, *dims.replicate_names):
            if name not in known:
                raise ValueError(f"there is no axis {name!r} in the mesh; it has {known}")

        def flat(names: tuple[str, ...]) -> DeviceMesh:
            return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))

        made = partial(cls, dims=dims)
        if not dims.shard_names:
            return made(mesh=flat(dims.replicate_names), shard_axis=None, replicate_axis=0)
        if not dims.replicate_names:
            return made(mesh=flat(dims.shard_names), shard_axis=0, replicate_axis=None)
        both = DeviceMesh._concatenate([flat(dims.replicate_names), flat(dims.shard_names)])
        return made(mesh=both, shard_axis=1, replicate_axis=0)

    @classmethod
    def of_info(cls, info: Any, beside: "DataMesh") -> "DataMesh":
        """The mesh of a ``ShardPlacementResult``, torch's ``FSDPMeshInfo``."""
        if info.mesh is beside.mesh:
            return beside
        return cls(
            mesh=info.mesh,
            shard_axis=info.shard_mesh_dim,
            replicate_axis=info.replicate_mesh_dim,
            dims=info.dp_mesh_dims,
        )

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        kind = self.mesh.device_type
        if kind == "cpu":
            return torch.device("cpu")
        return torch.device(kind, torch.get_device_module(kind).current_device())

    @property
    def shards(self) -> int:
        """Ranks over which parameters are cut."""
        return 1 if self.shard_axis is None else self.mesh.size(self.shard_axis)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All data-parallel ranks, global, in the order of the mesh."""
        return tuple(self.mesh.mesh.flatten().tolist())

    def axes(self) -> DataAxes:
        """The groups, with a communicator of its own for sums."""
        shard, replica = self._handle(self.shard_axis), self._handle(self.replicate_axis)
        here: Group = AloneGroup(dist.get_rank())
        return DataAxes(
            device=self.device,
            shard_gather=here if shard is None else group_over(shard, "shard_gather"),
            shard_reduce=here if shard is None else group_over(twin_of(shard), "shard_reduce"),
            replica=here if replica is None else group_over(replica, "replica"),
            gather_handle=shard,
            reduce_handle=None if shard is None else twin_of(shard),
        )

    def smaller(self, shards: int) -> Group:
        """The ``shards`` ranks, of the same ones, over which parameters are cut after forward."""
        if self.mesh not in _SMALLER:
            _SMALLER[self.mesh] = {}
        made: dict[int, Group] = _SMALLER[self.mesh]
        if shards not in made:
            ranks = self.mesh.mesh.view(-1, shards)
            mesh = DeviceMesh(self.mesh.device_type, ranks, mesh_dim_names=("outer", "inner"))
            made[shards] = group_over(mesh.get_group("inner"), "shard_gather")
        return made[shards]

    def placements(self, placement: Placement) -> tuple[Placement, ...]:
        """``placement`` on the shard axis, copies on the other."""
        whole = [Replicate(), Replicate()]
        if self.shard_axis is not None:
            whole[self.shard_axis] = placement  # type: ignore[call-overload]
        return tuple(whole[: self.mesh.ndim])

    def _handle(self, axis: int | None) -> dist.ProcessGroup | None:
        if axis is None or self.mesh.size(axis) == 1:
            return None
        return self.mesh.get_group(axis)
