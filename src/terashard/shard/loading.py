"""A state dict of full tensors into a sharded module: each rank takes its part of every tensor.

The state may be on every rank, a mapping or a file of which only the parts are read; or on rank 0
alone, and tensors travel one by one. What does not fit is refused by all ranks before any value is
changed, in a sentence, and nobody is left waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from terashard.comm.collectives import broadcast, first_problem, leads
from terashard.errors import RunError
from terashard.shard.residence import Residence
from terashard.shard.tree import shardings_in

Ranges = tuple[slice, ...]
"""By dim, which part of a tensor."""


@runtime_checkable
class InParts(Protocol):
    """A state of which parts can be read alone, as of a file."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""

    def part(self, name: str, ranges: Ranges) -> Tensor:
        """A part of one tensor."""


def spread_plain(
    units: Sequence[Residence], module: nn.Module, state: dict[str, Any], prefix: str
) -> None:
    """Put DTensors in place of what ``state`` holds in full for ``units`` inside ``module``.

    So a state dict of one device loads by ``load_state_dict``: each rank takes its part of it.
    """
    names = {child: name for name, child in module.named_modules()}
    for unit in units:
        for p in unit.parameters:
            for place in p.places:
                if place.module not in names:
                    continue
                inner = names[place.module]
                key = prefix + (f"{inner}." if inner else "") + place.attribute
                found = state.get(key)
                if found is not None:
                    p.digest = None  # how it was built does not matter any more
                if isinstance(found, Tensor) and type(found) in (Tensor, nn.Parameter):
                    state[key] = p.distribute(p.own_rows(found.detach()).to(p.local.device))


def load_full(
    module: nn.Module, state: Mapping[str, Tensor] | None, *, from_rank_0: bool = False
) -> None:
    """Load full tensors by name: each rank takes its parts of them.

    With ``from_rank_0`` only rank 0 needs ``state``. Parameters and persistent buffers on meta get
    memory; a buffer that is in no state dict stays as it is. Names and shapes must be exactly the
    module's, or all ranks raise ``RunError`` and nothing has changed.
    """
    wanted = module.state_dict(keep_vars=True)
    reads = leads() or not from_rank_0
    if wanted and state is not None and not state and not from_rank_0:
        problem: str | None = (
            "the state to be loaded is empty on a rank; load_full takes it on every rank, or"
            " from_rank_0=True if only rank 0 has it, as after full_state_dict(module)"
        )
    else:
        problem = _misfit(wanted, state) if reads else None
    problem = first_problem(problem)
    if problem is not None:
        raise RunError(problem)
    units = [unit for sharding in shardings_in(module) for unit in sharding.units]
    device = units[0].axes.device if units else torch.device("cpu")
    with torch.no_grad():
        for name, value in wanted.items():
            if from_rank_0:
                part = _cut(_sent(value, state[name] if reads and state else None, device), value)
            else:
                assert state is not None
                part = _read(name, value, state)
            _put(module, value, part, device)
    for unit in units:
        for p in unit.parameters:
            p.written, p.digest = True, None
        unit.rewritten()


def _misfit(wanted: Mapping[str, Tensor], state: Mapping[str, Tensor] | None) -> str | None:
    """Why ``state`` is not one of this module, or None."""
    if state is None:
        return "load_full was given no state; it takes one on every rank, or from_rank_0=True"
    missing, more = sorted(set(wanted) - set(state)), sorted(set(state) - set(wanted))
    if missing or more:
        return (
            f"the state to be loaded lacks {', '.join(missing[:3]) or 'nothing'} and has"
            f" {', '.join(more[:3]) or 'nothing'} beyond the module's names; take the state of the"
            " same model"
        )
    for name, value in wanted.items():
        shape = state.shape(name) if isinstance(state, InParts) else tuple(state[name].shape)
        if shape != tuple(value.shape):
            return (
                f"{name} has shape {tuple(value.shape)}, but {shape} is to be loaded; take the"
                " state of the same model"
            )
    return None


def _sent(value: Tensor, source: Tensor | None, device: torch.device) -> Tensor:
    """The full tensor that rank 0 has."""
    full = torch.empty(value.shape, dtype=value.dtype, device=device)
    if source is not None:
        full.copy_(source)
    broadcast(full)
    return full


def _read(name: str, value: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """This rank's part of a tensor of ``state``, read alone if that can be."""
    ranges = _ranges(value)
    if isinstance(state, InParts) and ranges is not None:
        return state.part(name, ranges)
    return _cut(state[name], value)


def _cut(full: Tensor, value: Tensor) -> Tensor:
    """This rank's part of ``full``, a view if that can be."""
    ranges = _ranges(value)
    if ranges is not None:
        return full[ranges]
    assert isinstance(value, DTensor)
    spread = distribute_tensor(
        full.to(value.dtype), value.device_mesh, value.placements, src_data_rank=None
    )
    return spread._local_tensor


def _ranges(value: Tensor) -> Ranges | None:
    """By dim, which part of ``value`` this rank has; None if it is not one run of each."""
    if not isinstance(value, DTensor):
        return (slice(None),) * value.dim()
    if any(type(placement) not in (Shard, Replicate) for placement in value.placements):
        return None
    sizes, starts = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _put(module: nn.Module, value: Tensor, part: Tensor, device: torch.device) -> None:
    """Write ``part`` into ``value``, or where it stands if it has no memory."""
    if isinstance(value, DTensor):
        value._local_tensor.copy_(part)
    elif not value.is_meta:
        value.copy_(part)
    else:
        made = part.to(device, value.dtype, copy=True)
        if isinstance(value, nn.Parameter):
            made = nn.Parameter(made, value.requires_grad)
        for tensors, attribute in _where(module, value):
            tensors[attribute] = made


def _where(module: nn.Module, tensor: Tensor) -> list[tuple[dict[str, Any], str]]:
    held = [h for m in module.modules() for h in (m._parameters, m._buffers)]
    return [(h, name) for h in held for name, found in h.items() if found is tensor]
