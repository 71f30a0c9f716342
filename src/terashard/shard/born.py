"""From a plain module to a sharded one: which parameters, cut how, in which units.

A call takes the parameters of its modules that no earlier call on a module inside took. A parameter
that an earlier unit owns and a later one uses too (a tied head) stays where it is: the later unit
borrows it. Parameters that are cut over different ranks (a placement function may say so) go into
units of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement
from torch.utils.weak import WeakTensorKeyDictionary

from terashard.comm.group import Group
from terashard.comm.pieces import local_part
from terashard.errors import ConfigError
from terashard.shard.division import divide
from terashard.shard.hooks import Sharding
from terashard.shard.module_unit import ModuleUnit
from terashard.shard.optimizer_watch import ignored, replaced
from terashard.shard.param import Place, ShardedParameter
from terashard.shard.placement import DataMesh
from terashard.shard.rules import Pool, Rules
from terashard.shard.tree import managed, sharding_of, shardings_in

_CUT = WeakTensorKeyDictionary()
"""By a parameter as it was before it was cut: its unit and what became of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One ``fully_shard`` call."""

    data: DataMesh
    rules: Rules
    pool: Pool
    placement: Callable[[nn.Parameter], Any] | None
    ignored: frozenset[nn.Parameter]


@dataclass(slots=True)
class _Found:
    """Parameters of the modules, each with the places where it stands."""

    places: dict[nn.Parameter, list[Place]] = field(default_factory=dict)
    names: dict[nn.Parameter, str] = field(default_factory=dict)


def shard_modules(modules: Sequence[nn.Module], request: Request) -> Sharding:
    """Cut the parameters of ``modules`` in place, and hook the modules."""
    for module in modules:
        if sharding_of(module) is not None:
            raise ConfigError(
                f"this {type(module).__name__} is sharded already; fully_shard takes a module once"
            )
    found = _collect(modules, request.ignored)
    ignored(request.ignored)
    known = _known(modules, found.places)
    owned = [p for p in found.places if p not in known]
    for parameter in owned:
        if hasattr(parameter, "_sharded_in"):
            raise ConfigError(
                f"parameter {found.names[parameter]} is sharded already, with"
                f" {parameter._sharded_in} around it; call fully_shard on inner modules first"
            )
    lenders: list[ModuleUnit] = []
    for parameter, places in found.places.items():
        if parameter in known:
            unit, sharded = known[parameter]
            sharded.places += places
            sharded.show_sharded()
            if unit not in lenders:
                lenders.append(unit)
    units = [
        _unit(modules[0], parameters, data, request, found)
        for data, parameters in _by_mesh(owned, request).items()
    ]
    for unit in units:
        unit.lenders = tuple(lenders)
    _move_buffers(modules, request.data.device)
    return Sharding(modules, units, request.rules, request.pool)


def _known(
    modules: Sequence[nn.Module], places: Iterable[nn.Parameter]
) -> dict[nn.Parameter, tuple[ModuleUnit, ShardedParameter]]:
    """Those that a unit owns already: shared before they were cut, or after, as DTensors."""
    known = {p: _CUT[p] for p in places if p in _CUT}
    for sharding in (s for module in modules for s in shardings_in(module)):
        known |= {p.sharded: (unit, p) for unit in sharding.units for p in unit.parameters}
    return known


def _unit(
    module: nn.Module,
    parameters: Sequence[tuple[nn.Parameter, Placement | None]],
    data: DataMesh,
    request: Request,
    found: _Found,
) -> ModuleUnit:
    axes = data.axes()
    described = []
    for parameter, placement in parameters:
        name = found.names[parameter]
        division = divide(name, parameter, data, axes, placement)
        alone = axes.shards * axes.replicas == 1
        described.append(
            ShardedParameter(
                name=name,
                form=division.form,
                cut=division.cut,
                compute=request.rules.compute_dtype(division.form.dtype),
                spread=division.spread,
                trainable=parameter.requires_grad,
                original=parameter,
                dress=division.dress,
                data_axes=division.data_axes,
                digest=None if alone or parameter.is_meta else digest_of(parameter),
                places=found.places[parameter],
            )
        )
    unit = ModuleUnit(
        type(module).__name__, module, described, axes=axes, ranks=data.ranks, rules=request.rules
    )
    if type(request.rules.reshard_after_forward) is int:
        unit.smaller = _smaller(data, request.rules.reshard_after_forward, unit)
    for (parameter, _), sharded in zip(parameters, described, strict=True):
        _CUT[parameter] = (unit, sharded)
        sharded.sharded._sharded_in = type(module).__name__  # type: ignore[attr-defined]
        replaced(parameter, sharded.name)
    return unit


def _smaller(data: DataMesh, count: int, unit: ModuleUnit) -> Group | None:
    """The ``count`` ranks over which ``unit`` is cut after forward."""
    if data.shards == 1:
        return None
    if data.shards % count:
        raise ConfigError(
            f"reshard_after_forward = {count} should divide the {data.shards} ranks over which"
            f" parameter {unit.parameters[0].name} is cut"
        )
    return data.smaller(count)


def digest_of(parameter: Tensor) -> int:
    """A checksum of the values, the same on all ranks that hold the same ones."""
    plain = local_part(parameter).detach().contiguous().cpu().reshape(-1)
    return crc32(plain.view(torch.uint8).numpy().data) if plain.numel() else 0


def _by_mesh(
    parameters: Sequence[nn.Parameter], request: Request
) -> dict[DataMesh, list[tuple[nn.Parameter, Placement | None]]]:
    grouped: dict[DataMesh, list[tuple[nn.Parameter, Placement | None]]] = {request.data: []}
    meshes: dict[tuple[Any, ...], DataMesh] = {}
    for parameter in parameters:
        placement = None if request.placement is None else request.placement(parameter)
        data = request.data
        info = getattr(placement, "mesh_info", None)
        if info is not None:
            placement = getattr(placement, "placement", None)
            key = (info.mesh, info.shard_mesh_dim, info.replicate_mesh_dim)
            data = meshes.setdefault(key, DataMesh.of_info(info, request.data))
        if placement is not None and not isinstance(placement, Placement):
            raise ValueError(
                f"shard_placement_fn returned {placement!r}; it may return Shard(dim), Replicate(),"
                " a ShardPlacementResult, or None"
            )
        grouped.setdefault(data, []).append((parameter, placement))
    if len(grouped) > 1 and not grouped[request.data]:
        del grouped[request.data]
    return grouped


def _collect(modules: Sequence[nn.Module], ignored: frozenset[nn.Parameter]) -> _Found:
    found = _Found()
    for prefix, module in managed(modules):
        for attribute, parameter in module._parameters.items():
            if parameter is None or parameter in ignored:
                continue
            found.places.setdefault(parameter, []).append(Place(module, attribute))
            found.names.setdefault(parameter, f"{prefix}.{attribute}" if prefix else attribute)
    return found


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    for _, module in managed(modules):
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                module._buffers[name] = buffer.to(device)
