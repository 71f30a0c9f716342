"""Full parameters of a sharded module: a look at them, a change, a state dict, and back.

Nothing here holds more than one unit full at a time, except where the caller asks for everything.
Every function is collective: all ranks of the mesh must call it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from terashard.comm.collectives import add_up, broadcast
from terashard.comm.group import Group
from terashard.errors import ConfigError, RunError
from terashard.shard.hooks import sharding_of, shardings_in
from terashard.shard.module_unit import ModuleUnit
from terashard.shard.param import ShardedParameter


@contextmanager
def full_parameters(
    module: nn.Module, *, writeback: bool = False, rank0_only: bool = False, recurse: bool = True
) -> Iterator[None]:
    """Let ``module`` hold full, plain parameters while open, to look at them or to change them.

    ``writeback``: what was changed, in place and alike on all ranks, is kept. ``rank0_only``: the
    other ranks take part but keep their DTensors. Parameters are in the kept format, not in that of
    a mixed-precision policy. ``recurse``: units inside too. Not inside a forward or backward pass.
    """
    if writeback and rank0_only:
        raise ConfigError(
            "full_parameters(writeback=True, rank0_only=True) would change one rank alone; give"
            " one of the two"
        )
    units = _units(module, recurse)
    shown = [pair for unit in units for pair in _shown(unit, rank0_only)]
    try:
        yield
    finally:
        with torch.no_grad():
            for p, full in shown:
                there = p.places[0].find()
                if writeback and there is not None:
                    p.local.copy_(p.own_rows(_plain(there.detach(), full)))
                p.show_sharded()
        if writeback:
            for unit in units:
                unit.rewritten()


def _shown(unit: ModuleUnit, rank0_only: bool) -> Iterator[tuple[ShardedParameter, Tensor]]:
    """The parameters that now stand full in the modules, each with its full tensor."""
    if unit.is_active:
        raise RunError(
            f"full_parameters was entered while unit {unit.name} computes; enter it between passes"
        )
    unit.drop()
    for p in unit.parameters:
        full = gathered(p, unit)
        if not rank0_only or _is_first(unit):
            leaf = nn.Parameter(full, requires_grad=p.sharded.requires_grad)
            for place in p.places:
                place.put(leaf)
            yield p, full


def full_state_dict(
    module: nn.Module, *, rank0_only: bool = True, cpu: bool = True
) -> dict[str, Tensor]:
    """The state dict with full tensors; with ``rank0_only`` it is empty on the other ranks."""
    return dict(full_tensors(module, rank0_only=rank0_only, cpu=cpu))


def full_tensors(
    module: nn.Module, *, rank0_only: bool = True, cpu: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Name and full tensor, one after the other: a state dict that is never there as a whole."""
    state = module.state_dict()
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    for name in list(state):
        value = state.pop(name)
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if first or not rank0_only:
            value = value.detach()
            yield name, value.cpu() if cpu else value


def load_full(
    module: nn.Module, state: Mapping[str, Tensor] | None, *, from_rank_0: bool = False
) -> None:
    """Load full tensors by name: each rank takes its parts of them.

    With ``from_rank_0`` only rank 0 needs ``state``, and tensors travel one by one. ``state`` may
    be a mapping that reads tensors when they are asked for. Names must be exactly the module's.
    """
    wanted = module.state_dict()
    if state is not None:
        _require_names(set(wanted), set(state))
    with torch.no_grad():
        for name, value in wanted.items():
            _fill(name, value, _source(name, value, state, from_rank_0))
    for unit in _units(module, True):
        for p in unit.parameters:
            p.written = True
        unit.rewritten()


def synchronise(module: nn.Module) -> None:
    """Give all ranks the values of rank 0, parameters and buffers, before or after sharding."""
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
        unit.rewritten()


def synchronise_buffers(module: nn.Module, *, mean: bool = True) -> None:
    """Make the buffers of all ranks alike: their mean where they are numbers, or rank 0's."""
    with torch.no_grad():
        for buffer in module.buffers():
            if mean and buffer.is_floating_point():
                buffer /= add_up(buffer)
            else:
                broadcast(buffer)


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


def _plain(value: Tensor, like: Tensor) -> Tensor:
    if value.shape != like.shape:
        raise RunError(
            f"a parameter of shape {tuple(like.shape)} was replaced by one of shape"
            f" {tuple(value.shape)} inside full_parameters; change values, not shapes"
        )
    return value


def _fill(name: str, value: Any, source: Tensor) -> None:
    if tuple(source.shape) != tuple(value.shape):
        raise RunError(
            f"{name} has shape {tuple(value.shape)}, but {tuple(source.shape)} is to be loaded;"
            " take the state of the same model"
        )
    if isinstance(value, DTensor):
        spread = distribute_tensor(
            source.to(value.dtype), value.device_mesh, value.placements, src_data_rank=None
        )
        value._local_tensor.copy_(spread._local_tensor)
    else:
        value.copy_(source)


def _source(name: str, value: Any, state: Mapping[str, Tensor] | None, from_rank_0: bool) -> Tensor:
    if not from_rank_0:
        if state is None:
            raise ConfigError("load_full needs a state on every rank, or from_rank_0=True")
        return state[name]
    first = torch.distributed.get_rank() == 0
    local = value._local_tensor if isinstance(value, DTensor) else value
    if first:
        assert state is not None
        source = state[name].to(local.device, local.dtype).contiguous()
    else:
        source = torch.empty(tuple(value.shape), dtype=local.dtype, device=local.device)
    broadcast(source)
    return source


def _require_names(wanted: set[str], found: set[str]) -> None:
    if wanted != found:
        missing, more = sorted(wanted - found), sorted(found - wanted)
        raise RunError(
            f"the state to be loaded lacks {', '.join(missing[:3]) or 'nothing'} and has"
            f" {', '.join(more[:3]) or 'nothing'} beyond the module's names; take the state of the"
            " same model"
        )


def _units(module: nn.Module, recurse: bool) -> list[ModuleUnit]:
    own = sharding_of(module)
    shardings = shardings_in(module) if recurse else [own] if own is not None else []
    return [unit for sharding in shardings for unit in sharding.units]


def _is_first(unit: ModuleUnit) -> bool:
    return unit.axes.shard == 0 and unit.axes.replica.rank == 0
