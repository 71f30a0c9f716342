"""Optimizer state by parameter name, full, so that any number of ranks and any cut can load it.

A state dict of torch numbers parameters in the order in which the optimizer was given them; another
wrapping, or another optimizer, numbers them otherwise. Here each state belongs to a name. State of
a parameter's shape, or with one number per row, is brought together to a full tensor; counters stay
as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from terashard.comm.collectives import full_of, leads
from terashard.errors import RunError

State = dict[str, dict[str, Any]]


def optimizer_by_name(
    module: nn.Module, optimizer: torch.optim.Optimizer, *, rank0_only: bool = True
) -> State:
    """Name of a parameter → its full state, on the CPU; empty on other ranks if ``rank0_only``.

    A snapshot. A parameter that made no step yet, or whose optimizer keeps nothing, has no entries.
    Collective. Held full: one tensor at a time, but for what is returned.
    """
    found: State = {}
    for name, parameter in _trained(module, optimizer):
        own = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, DTensor):
                value = full_of(value)
            own[key] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        if leads() or not rank0_only:
            found[name] = own
    return found


def load_optimizer_by_name(
    module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Give ``optimizer`` the states in ``state``, which every rank has, each rank its parts.

    No step is counted. Raises ``RunError`` for a parameter without a state, or of another shape.
    """
    for name, parameter in _trained(module, optimizer):
        if name not in state:
            raise RunError(
                f"there is no optimizer state for parameter {name}; there is for"
                f" {', '.join(list(state)[:3])}, …: take the state of the same model"
            )
        own = {key: _own(name, parameter, value) for key, value in state[name].items()}
        optimizer.state.pop(parameter, None)
        if own:
            optimizer.state[parameter] = own


def _own(name: str, parameter: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not value.dim():
        return value.clone()
    if value.shape not in (parameter.shape, parameter.shape[:1]):
        raise RunError(
            f"the optimizer state of parameter {name} has shape {tuple(value.shape)}, the parameter"
            f" {tuple(parameter.shape)}; take the state of the same model"
        )
    if not isinstance(parameter, DTensor):
        return value.to(parameter.device, copy=True)
    local = value.to(parameter._local_tensor.device)
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(local, mesh, placements, src_data_rank=None)


def _trained(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, nn.Parameter]]:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in module.named_parameters():
        if id(parameter) in held:
            yield name, parameter
