"""The optimizer: any class of ``torch.optim`` that works element by element, on sharded parameters.

Groups: the first pattern of ``optimizer.groups`` that matches a parameter's global name decides; of the rest, matrices
decay and norms and biases do not. A weight that two stages share is named once, by its first stage, so that both copies
get the same options and stay equal.
"""

import inspect
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from terashard.config.schema import OptimizerConfig
from terashard.errors import ConfigError

WHOLE_PARAMETER = frozenset({"Adafactor", "LBFGS", "Muon", "SparseAdam"})
"""Optimizers that look at a whole parameter (or the whole model) at once: wrong on shards."""


def build_optimizer(
    config: OptimizerConfig, parameters: Iterable[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """The optimizer that ``config`` names, over (global name, parameter) pairs."""
    kind = _find(config.name)
    groups = _groups(config, parameters)
    options: dict[str, Any] = {"lr": config.lr, **_fused(kind), **config.options}
    allowed = inspect.signature(kind).parameters
    for given in (options, *(g.options for g in config.groups)):
        for unknown in given.keys() - allowed.keys():
            known = ", ".join(name for name in allowed if name != "params")
            raise ConfigError(f"{config.name} has no option {unknown!r}; its options are: {known}")
    if "weight_decay" not in allowed:
        groups = [{k: v for k, v in group.items() if k != "weight_decay"} for group in groups]
    try:
        made: torch.optim.Optimizer = kind(groups, **_tuples(options))
    except (TypeError, ValueError) as cause:
        raise ConfigError(f"optimizer {config.name} refuses its options: {cause}") from cause
    for group in made.param_groups:
        group["peak_lr"] = group["lr"]
    return made


def set_rate(optimizer: torch.optim.Optimizer, part: float) -> None:
    """Set every group's learning rate to ``part`` of its own peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * part


def _find(name: str) -> Any:
    kind = getattr(torch.optim, name, None)
    if name in WHOLE_PARAMETER:
        raise ConfigError(
            f"optimizer.name = {name!r} needs whole parameters, but every rank holds only its rows of them;"
            " use one that works element by element, such as AdamW or SGD"
        )
    if (
        not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer))
        or kind is torch.optim.Optimizer
    ):
        names = sorted(
            n for n, k in vars(torch.optim).items() if isinstance(k, type) and n != "Optimizer"
        )
        fit = ", ".join(n for n in names if n not in WHOLE_PARAMETER)
        raise ConfigError(f"optimizer.name = {name!r} is no class of torch.optim; there are: {fit}")
    return kind


FUSED = frozenset({"Adam", "AdamW", "Adagrad"})
"""Classes whose fused kernel takes DTensors in torch 2.13; it saves most of what DTensors cost."""


def _fused(kind: Any) -> dict[str, Any]:
    return {"fused": True} if kind.__name__ in FUSED else {}


def _groups(
    config: OptimizerConfig, parameters: Iterable[tuple[str, nn.Parameter]]
) -> list[dict[str, Any]]:
    grouped: dict[object, dict[str, Any]] = {}
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        index = next((i for i, g in enumerate(config.groups) if fnmatchcase(name, g.match)), None)
        decays = parameter.dim() > 1
        options = {"weight_decay": config.weight_decay if decays else 0.0}
        if index is not None:
            options |= _tuples(config.groups[index].options)
        group = grouped.setdefault((index, decays), {"params": [], **options})
        group["params"].append(parameter)
    return list(grouped.values())


def _tuples(options: dict[str, Any]) -> dict[str, Any]:
    """TOML has lists where torch wants tuples (betas)."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
