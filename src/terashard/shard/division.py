r"""How one parameter is cut over the data-parallel ranks, and which DTensor results.

Parameters that are DTensors already, of a tensor-parallel mesh beside the data-parallel one or of
the full mesh whose data axes are named, are cut in their local part. The public DTensor then says
both: with tensor-parallel ways that cut the same dim, the data cut is a strided one, because they
cut first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from terashard.comm.pieces import local_part
from terashard.errors import ConfigError
from terashard.shard.axes import DataAxes
from terashard.shard.flat import Form
from terashard.shard.param import Cut, Spread
from terashard.shard.placement import DataMesh


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
    form = Form.like(local_part(parameter).detach())
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
        return Replicate() if _adam_would_miss(form, axes) else Shard(0)
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


def _adam_would_miss(form: Form, axes: DataAxes) -> bool:
    """Whether torch's Adam would change a copy: of complex vectors that are cut unevenly.

    ``view_as_real`` of such a DTensor is a copy in torch 2.13. Vectors are small: all ranks keep
    all of it.
    """
    return form.dtype.is_complex and len(form.shape) == 1 and form.shape[0] % axes.shards != 0


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
