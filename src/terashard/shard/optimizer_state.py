"""Optimizer state by parameter name, full, so that any number of ranks and any cut can load it.

A state dict of torch numbers parameters in the order in which the optimizer was given them; another
wrapping, or another optimizer, numbers them otherwise. Here each state belongs to a name. State of
a parameter's shape, or with one number per row, is brought together to a full tensor; counters stay
as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from terashard.comm.collectives import first_problem, full_of, leads, sent
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
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Mapping[str, Any]] | None,
    *,
    from_rank_0: bool = False,
) -> None:
    """Give ``optimizer`` the states in ``state``, each rank its parts.

    Every rank has ``state``, or, with ``from_rank_0``, rank 0 alone: then it travels one parameter
    at a time. No step is counted. Collective. Where a parameter has no state, or one of another
    shape, all ranks raise ``RunError`` and nothing has changed.
    """
    trained = list(_trained(module, optimizer))
    reads = leads() or not from_rank_0
    problem = first_problem(_misfit(trained, state or {}) if reads else None)
    if problem is not None:
        raise RunError(problem)
    for name, parameter in trained:
        found = None if state is None or not reads else state[name]
        found = sent(found) if from_rank_0 else found
        own = {key: _own(parameter, value) for key, value in (found or {}).items()}
        optimizer.state.pop(parameter, None)
        if own:
            optimizer.state[parameter] = own


def _misfit(
    trained: Sequence[tuple[str, Tensor]], state: Mapping[str, Mapping[str, Any]]
) -> str | None:
    """Why ``state`` is not one of these parameters, or None."""
    if trained and not state:
        return (
            "the optimizer state to be loaded is empty on a rank; give it on every rank, or"
            " from_rank_0=True if only rank 0 has it, as after optimizer_by_name(module, optimizer)"
        )
    for name, parameter in trained:
        if name not in state:
            return (
                f"there is no optimizer state for parameter {name}; there is for"
                f" {', '.join(list(state)[:3])}, …: take the state of the same model"
            )
        for value in state[name].values():
            shaped = isinstance(value, Tensor) and value.dim()
            if shaped and value.shape not in (parameter.shape, parameter.shape[:1]):
                return (
                    f"the optimizer state of parameter {name} has shape {tuple(value.shape)}, the"
                    f" parameter {tuple(parameter.shape)}; take the state of the same model"
                )
    return None


def _own(parameter: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not value.dim():
        return value.clone()
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
