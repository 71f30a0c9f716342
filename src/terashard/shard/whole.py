"""Full parameters of a sharded module: a look at them, a change, a state dict.

Nothing here holds more than one unit full at a time, except where the caller asks for everything.
Every function is collective: all ranks of the mesh must call it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from terashard.comm.collectives import add_up, broadcast, full_of, leads
from terashard.comm.group import Group
from terashard.comm.pieces import local_part
from terashard.errors import ConfigError, RunError
from terashard.shard.hooks import Sharding
from terashard.shard.module_unit import ModuleUnit
from terashard.shard.param import ShardedParameter
from terashard.shard.tree import sharding_of, shardings_in


@contextmanager
def full_parameters(
    module: nn.Module, *, writeback: bool = False, rank0_only: bool = False, recurse: bool = True
) -> Iterator[None]:
    """Let ``module`` hold full, plain parameters while open, to look at them or to change them.

    ``writeback``: what was changed, in place and alike on all ranks, is kept. ``rank0_only``: the
    other ranks take part but keep their DTensors. Parameters are in the kept format, not in that of
    a mixed-precision policy. ``recurse``: units inside too. Not inside a forward or backward pass.
    A module on which ``unshard()`` was called is in pieces afterwards.
    """
    if writeback and rank0_only:
        raise ConfigError(
            "full_parameters(writeback=True, rank0_only=True) would change one rank alone; give"
            " one of the two"
        )
    shardings = _shardings(module, recurse)
    for sharding in shardings:
        _require_rest(sharding)
    shown: list[tuple[ShardedParameter, Tensor]] = []
    try:
        for sharding in shardings:
            sharding.is_open = True
            for unit in sharding.units:
                shown.extend(_shown(unit, rank0_only))
        yield
    finally:
        for sharding in shardings:
            sharding.is_open = False
        _put_back(shown, writeback)
        if writeback:
            for unit in _units(module, recurse):
                unit.rewritten()


def _require_rest(sharding: Sharding) -> None:
    """Refuse full parameters in a pass, or twice."""
    name = sharding.units[0].name
    if sharding.is_open:
        raise RunError(f"full_parameters is open for unit {name} already; leave it first")
    if sharding.is_running:
        raise RunError(
            f"full_parameters was entered while unit {name} computes; enter it between passes, or"
            " after reset_iter_state() if one was broken off"
        )


def _shown(unit: ModuleUnit, rank0_only: bool) -> Iterator[tuple[ShardedParameter, Tensor]]:
    """The parameters that now stand full in the modules, each with its full tensor."""
    unit.drop()
    unit.adopt()
    for p in unit.parameters:
        p.require_written()
        full = gathered(p, unit)
        if not rank0_only or _is_first(unit):
            leaf = nn.Parameter(full, requires_grad=p.sharded.requires_grad)
            for place in p.places:
                place.put(leaf)
            yield p, full


def _put_back(shown: list[tuple[ShardedParameter, Tensor]], writeback: bool) -> None:
    """Let the DTensors stand again, with what is there now if ``writeback``."""
    problem = None
    for p, full in shown:
        there = p.places[0].find()
        if writeback and there is not None and there.shape != full.shape:
            problem = (
                f"parameter {p.name} of shape {tuple(full.shape)} was replaced by one of shape"
                f" {tuple(there.shape)} inside full_parameters; change values, not shapes"
            )
        elif writeback and there is not None:
            with torch.no_grad():
                p.local.copy_(p.own_rows(there.detach()))
        p.show_sharded()
    if problem is not None:
        raise RunError(problem)


def full_state_dict(
    module: nn.Module, *, rank0_only: bool = True, cpu: bool = True
) -> dict[str, Any]:
    """The state dict with full tensors; with ``rank0_only`` it is empty on the other ranks.

    A snapshot: it shares no memory with the module.
    """
    tensors = (t for t in module.state_dict().values() if isinstance(t, Tensor))
    live = {local_part(t).untyped_storage()._cdata for t in tensors}
    found: dict[str, Any] = {}
    for name, value in full_values(module, rank0_only=rank0_only, cpu=cpu):
        shares = isinstance(value, Tensor) and value.untyped_storage()._cdata in live
        found[name] = value.clone() if shares else deepcopy(value)
    return found


def full_values(
    module: nn.Module, *, rank0_only: bool = True, cpu: bool = True
) -> Iterator[tuple[str, Any]]:
    """Name and full tensor, one after the other: a state dict that is never there as a whole.

    What modules keep beside tensors (``get_extra_state``) comes as it is.
    """
    for unit in _units(module, True):
        unit.adopt()
        for p in unit.parameters:
            p.require_written()
    state = module.state_dict()
    for name in list(state):
        value = state.pop(name)
        if isinstance(value, DTensor):
            value = full_of(value)
        if leads() or not rank0_only:
            if isinstance(value, Tensor):
                value = value.detach().cpu() if cpu else value.detach()
            yield name, value


def synchronise(module: nn.Module) -> None:
    """Give all ranks the values of rank 0, parameters and buffers.

    After sharding, replicas get those of the first one. Ranks that cut a parameter built otherwise
    cannot be mended then, as nobody has all of it: call it before ``fully_shard``.
    """
    tensors = [*module.parameters(), *module.buffers()]
    with torch.no_grad():
        for tensor in dict.fromkeys(tensors):
            if isinstance(tensor, DTensor):
                for axis, placement in enumerate(tensor.placements):
                    if placement.is_replicate():
                        broadcast(tensor._local_tensor, tensor.device_mesh.get_group(axis))
            else:
                broadcast(tensor.data)
    for unit in _units(module, True):
        for p in unit.parameters:
            if p.cut.dim is None or p.cut.shards == 1:
                p.digest = None
        unit.rewritten()


def synchronise_buffers(
    module: nn.Module, mesh: DeviceMesh | None = None, *, mean: bool = True
) -> None:
    """Make the buffers of all ranks, or of those of ``mesh``, alike.

    Floating-point ones become their mean, others, or all if not ``mean``, those of the first rank.
    """
    groups = [None] if mesh is None else mesh.get_all_groups()
    with torch.no_grad():
        for buffer in module.buffers():
            if mean and buffer.is_floating_point():
                total = buffer.double()  # so that the mean of equal values is that value
                buffer.copy_(total / prod(add_up(total, group) for group in groups))
            else:
                for group in groups:
                    broadcast(buffer, group)


def gathered(p: ShardedParameter, unit: ModuleUnit) -> Tensor:
    """The full values of one parameter, in the format in which it is kept."""
    full = torch.empty(p.shape, dtype=p.form.dtype, device=unit.axes.device)
    travelling = torch.empty_like(p.as_rows(full), memory_format=torch.contiguous_format)
    home = p.at_home(travelling)
    p.own_rows(home).copy_(p.local)
    group: Group = unit.axes.shard_gather
    if group.size > 1 and not p.is_scalar:
        group.gather_rows([travelling]).wait()
    return full.copy_(home)


def _shardings(module: nn.Module, recurse: bool) -> list[Sharding]:
    own = sharding_of(module)
    return shardings_in(module) if recurse else [own] if own is not None else []


def _units(module: nn.Module, recurse: bool) -> list[ModuleUnit]:
    return [unit for sharding in _shardings(module, recurse) for unit in sharding.units]


def _is_first(unit: ModuleUnit) -> bool:
    return unit.axes.shard == 0 and unit.axes.replica.rank == 0
