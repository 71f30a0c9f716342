r"""Over which ranks a module is sharded by itself, and how each of its parameters is cut.

A one-dimensional ``DeviceMesh`` cuts every parameter over all its ranks; a two-dimensional one cuts
over the second axis and replicates over the first. Parameters that are DTensors already, of a
tensor-parallel mesh beside it or of the full mesh whose data-parallel axes are named, are cut in
their local part. The public DTensor then says both: with TP ways that cut the same dim, the data
cut is a strided one, because TP cuts first.

Gathers and reductions get a process group each, made once for every group of shards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from terashard.comm.alone import AloneGroup
from terashard.comm.collectives import group_over, twin_of
from terashard.comm.group import Group
from terashard.errors import ConfigError
from terashard.shard.axes import DataAxes
from terashard.shard.flat import Form
from terashard.shard.param import Cut, Spread


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataMesh:
    """The data-parallel ranks of one ``fully_shard`` call.

    ``mesh`` has the data axes only: (replicate, shard), or one of the two. ``spmd`` is the full
    mesh that parameters are DTensors on already, if ``dims`` names its data axes.
    """

    mesh: DeviceMesh
    shard_axis: int | None
    replicate_axis: int | None
    dims: DataParallelMeshDims | None = None
    spmd: DeviceMesh | None = None

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

        made = partial(cls, dims=dims, spmd=mesh)
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
            spmd=info.spmd_mesh,
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

    def smaller(self, shards: int) -> "DataMesh":
        """The same ranks in groups of ``shards``, to which parameters are cut after forward."""
        ranks = self.mesh.mesh.view(-1, shards)
        mesh = DeviceMesh(self.mesh.device_type, ranks, mesh_dim_names=("outer", "inner"))
        return DataMesh(mesh=mesh, shard_axis=1, replicate_axis=0)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How one parameter is cut: its form, whose part is which, and the DTensor that results."""

    form: Form
    cut: Cut
    spread: Spread
    dress: Callable[[Tensor], Tensor] | None = None
    data_axes: tuple[int, ...] = ()
    """Axes of the full leaf's own mesh that are data-parallel."""


def divide(
    name: str, parameter: nn.Parameter, data: DataMesh, axes: DataAxes, placement: Placement | None
) -> Division:
    """How ``parameter`` is cut over ``data``; ``placement``: Shard, Replicate, or None for rows."""
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    form = Form.like(local.detach())
    placement = _settled(name, form, placement, axes)
    dim = placement.dim if isinstance(placement, Shard) else None
    cut = Cut(dim, axes.shards, axes.shard)
    if not isinstance(parameter, DTensor):
        if data.dims is not None:
            raise ValueError(
                f"with dp_mesh_dims all parameters must be DTensors on the full mesh, but {name} is"
                " a plain tensor; distribute it first"
            )
        spread = Spread(
            mesh=data.mesh,
            placements=data.placements(placement),
            shape=form.shape,
            stride=form.stride,
        )
        return Division(form=form, cut=cut, spread=spread)
    spread = (
        _beside(parameter, data, placement)
        if data.dims is None
        else _inside(name, parameter, data, placement)
    )
    return Division(
        form=form,
        cut=cut,
        spread=spread,
        dress=_dresser(parameter),
        data_axes=_data_axes(parameter, data),
    )


def _settled(name: str, form: Form, placement: Placement | None, axes: DataAxes) -> Placement:
    if not form.shape:
        return Replicate()
    if placement is None:
        return Shard(0)
    if not isinstance(placement, Shard):
        return placement
    dim = placement.dim + len(form.shape) if placement.dim < 0 else placement.dim
    if not 0 <= dim < len(form.shape):
        raise ConfigError(
            f"parameter {name} of shape {tuple(form.shape)} cannot be cut along dim {dim};"
            f" dims 0 to {len(form.shape) - 1} are there"
        )
    return Shard(dim)


def _data_axes(parameter: DTensor, data: DataMesh) -> tuple[int, ...]:
    names = parameter.device_mesh.mesh_dim_names
    if data.dims is None or names is None:
        return ()
    return tuple(names.index(n) for n in (*data.dims.shard_names, *data.dims.replicate_names))


def _dresser(parameter: DTensor) -> Callable[[Tensor], Tensor]:
    return partial(
        DTensor.from_local,
        device_mesh=parameter.device_mesh,
        placements=parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _beside(parameter: DTensor, data: DataMesh, placement: Placement) -> Spread:
    """The parameter is spread over a tensor-parallel mesh beside the data-parallel one."""
    mesh = DeviceMesh._concatenate([data.mesh, parameter.device_mesh])
    if isinstance(placement, Shard):
        ways = _ways(parameter.placements, parameter.device_mesh, placement.dim, 0)
        placement = _strided(placement, ways)
    return Spread(
        mesh=mesh,
        placements=(*data.placements(placement), *parameter.placements),
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _inside(name: str, parameter: DTensor, data: DataMesh, placement: Placement) -> Spread:
    """The parameter is spread over the full mesh, as copies on the data axes."""
    mesh, dims = parameter.device_mesh, data.dims
    assert dims is not None
    assert mesh.mesh_dim_names is not None
    found = list(parameter.placements)
    for axis in (*dims.shard_names, *dims.replicate_names):
        at = mesh.mesh_dim_names.index(axis)
        if not isinstance(found[at], Replicate):
            raise ValueError(
                f"parameter {name} must be Replicate() on the data axis {axis!r}, but is"
                f" {found[at]} there"
            )
    if len(dims.shard_names) > 1:
        return _flattened(parameter, data, placement)
    for axis in dims.shard_names:
        at = mesh.mesh_dim_names.index(axis)
        if isinstance(placement, Shard):
            found[at] = _strided(placement, _ways(found, mesh, placement.dim, at + 1))
    return Spread(
        mesh=mesh, placements=tuple(found), shape=parameter.shape, stride=parameter.stride()
    )


def _flattened(parameter: DTensor, data: DataMesh, placement: Placement) -> Spread:
    """Several axes of the full mesh shard together: one axis stands for them in the DTensor."""
    mesh, dims = parameter.device_mesh, data.dims
    assert dims is not None
    assert mesh.mesh_dim_names is not None
    others = [
        name
        for name in mesh.mesh_dim_names
        if name not in (*dims.shard_names, *dims.replicate_names)
    ]
    kept = [parameter.placements[mesh.mesh_dim_names.index(name)] for name in others]
    if isinstance(placement, Shard):
        ways = _ways(parameter.placements, mesh, placement.dim, 0)
        placement = _strided(placement, ways)
    whole = DeviceMesh._concatenate([data.mesh, *(mesh[name] for name in others)])
    return Spread(
        mesh=whole,
        placements=(*data.placements(placement), *kept),
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _ways(
    placements: tuple[Placement, ...] | list[Placement], mesh: DeviceMesh, dim: int, start: int
) -> int:
    """Into how many parts the mesh's axes from ``start`` on cut ``dim``."""
    ways = 1
    for axis in range(start, mesh.ndim):
        placement = placements[axis]
        if isinstance(placement, Shard | _StridedShard) and placement.dim == dim:
            ways *= mesh.size(axis)
    return ways


def _strided(placement: Shard, ways: int) -> Placement:
    return _StridedShard(placement.dim, split_factor=ways) if ways > 1 else placement
