"""Looks at optimizers: do they hold what is trained, and do their steps show?

An optimizer may hold parameters which sharding has replaced.

Such an optimizer steps on tensors that nobody computes with any more: nothing trains, and nothing
says so. Parameters that were replaced are remembered for as long as somebody holds them; every
optimizer is looked at in its first step, and in the first one after it was given more parameters
or more were replaced. Other steps cost a look at how many it holds.

Steps of many tensors at once do not raise the version counters by which a unit that stays full
knows that its values changed. So after every step they are raised here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from terashard.errors import RunError

_REPLACED = WeakTensorKeyDictionary()
_SEEN: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
"""How many parameters an optimizer held when it was found to be right."""

_IGNORED = WeakTensorKeyDictionary()

_HOOKS: list[Any] = []


def replaced(parameter: nn.Parameter, name: str) -> None:
    """Remember that ``parameter`` stands in no module any more."""
    _REPLACED[parameter] = name
    _SEEN.clear()
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_pre_hook(_look))
        _HOOKS.append(register_optimizer_step_post_hook(_show))


def _look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _SEEN.get(optimizer) == count:
        return
    held = [
        _REPLACED[parameter]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in _REPLACED
    ]
    if held:
        parameters = "parameter" if len(held) == 1 else "parameters"
        names = ", ".join([*held[:3], *(["…"] if len(held) > 3 else [])])
        raise RunError(
            f"this {type(optimizer).__name__} holds {len(held)} {parameters} that fully_shard has"
            f" replaced ({names}), so its steps would train nothing; build the optimizer after"
            " sharding"
        )
    _warn_of_others(optimizer)
    _SEEN[optimizer] = count


def ignored(parameters: Iterable[nn.Parameter]) -> None:
    """Remember that ``parameters`` are left alone on purpose."""
    for parameter in parameters:
        _IGNORED[parameter] = True


def _warn_of_others(optimizer: torch.optim.Optimizer) -> None:
    """Say that parameters beside sharded ones are trained by each rank for itself."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(isinstance(p, DTensor) and p.device_mesh.size() > 1 for p in held):
        return
    others = [p for p in held if not isinstance(p, DTensor) and p not in _IGNORED]
    if others:
        shapes = ", ".join(str(tuple(p.shape)) for p in others[:3])
        warnings.warn(
            f"this {type(optimizer).__name__} also holds {len(others)} plain parameters (of shape"
            f" {shapes}{', …' if len(others) > 3 else ''}): nothing sums their gradients, so ranks"
            " will differ. Call fully_shard on the root module too, after its inner modules; or"
            " name them in ignored_params if that is meant",
            stacklevel=5,
        )


def _show(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        stepped = [p for p in group["params"] if isinstance(p, DTensor) and p.grad is not None]
        if stepped:
            torch.autograd.graph.increment_version(stepped)
