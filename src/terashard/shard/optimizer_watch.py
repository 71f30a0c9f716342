"""Finds an optimizer that holds parameters which sharding has replaced.

Such an optimizer steps on tensors that nobody computes with any more: nothing trains, and nothing
says so. Parameters that were replaced are remembered for as long as somebody holds them; every
optimizer is looked at in its first step, and in the first one after more were replaced.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from terashard.errors import RunError

_REPLACED = WeakTensorKeyDictionary()
_SEEN: WeakSet[torch.optim.Optimizer] = WeakSet()
_HOOKS: list[Any] = []


def replaced(parameter: nn.Parameter, name: str) -> None:
    """Remember that ``parameter`` stands in no module any more."""
    _REPLACED[parameter] = name
    _SEEN.clear()
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_pre_hook(_look))


def _look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if optimizer in _SEEN:
        return
    held = [
        _REPLACED[parameter]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in _REPLACED
    ]
    if held:
        raise RunError(
            f"this {type(optimizer).__name__} holds {len(held)} parameters that fully_shard has"
            f" replaced ({', '.join(held[:3])}, …), so its steps would train nothing; build the"
            " optimizer after sharding"
        )
    _SEEN.add(optimizer)
