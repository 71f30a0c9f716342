"""The optimizer: any class of ``torch.optim`` that works element by element, on sharded parameters.

Groups: the first pattern of ``optimizer.groups`` that matches a parameter's global name decides; of
the rest, matrices decay, norms and biases do not. A weight that two stages share has one name, so
that both copies get the same options and stay equal.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from terashard.config.optimizers import FUSED, OPTIONS, require_known, require_matches
from terashard.config.schema import OptimizerConfig
from terashard.errors import ConfigError
from terashard.spec.model import ModelSpec


def build_optimizer(
    config: OptimizerConfig, parameters: Iterable[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """The optimizer that ``config`` names, over (global name, parameter) pairs."""
    require_known(config)
    kind: Any = getattr(torch.optim, config.name)
    groups = _groups(config, parameters, decays="weight_decay" in OPTIONS[config.name])
    fused = {"fused": True} if config.name in FUSED else {}
    try:
        made: torch.optim.Optimizer = kind(
            groups, **{"lr": config.lr, **fused, **_tuples(config.options)}
        )
    except (TypeError, ValueError, RuntimeError) as cause:
        raise ConfigError(f"optimizer {config.name} refuses its options: {cause}") from cause
    for group in made.param_groups:
        group["peak_lr"] = group["lr"]
    return made


def check_optimizer(config: OptimizerConfig, spec: ModelSpec) -> None:
    """Refuse what ``build_optimizer`` would, and patterns that match no parameter of ``spec``."""
    shapes = spec.parameters()
    require_matches(config, shapes.keys())
    empty = ((n, nn.Parameter(torch.empty((0,) * len(shape)))) for n, shape in shapes.items())
    build_optimizer(config, empty)


def options_of(config: OptimizerConfig, name: str) -> dict[str, Any]:
    """The options that the parameter of the global ``name`` has, but rate and decay."""
    group = next((g for g in config.groups if fnmatchcase(name, g.match)), None)
    return {**config.options, **(group.options if group else {})}


def set_rate(optimizer: torch.optim.Optimizer, part: float) -> None:
    """Set every group's learning rate to ``part`` of its own peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * part


def _groups(
    config: OptimizerConfig, parameters: Iterable[tuple[str, nn.Parameter]], *, decays: bool
) -> list[dict[str, Any]]:
    """Parameters with the same options together; ``decays``: whether the class knows decay."""
    grouped: dict[object, dict[str, Any]] = {}
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        index = next((i for i, g in enumerate(config.groups) if fnmatchcase(name, g.match)), None)
        is_matrix = parameter.dim() > 1
        options: dict[str, Any] = {}
        if decays:
            options["weight_decay"] = config.weight_decay if is_matrix else 0.0
        if index is not None:
            options |= _tuples(config.groups[index].options)
        group = grouped.setdefault((index, is_matrix), {"params": [], **options})
        group["params"].append(parameter)
    return list(grouped.values())


def _tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """TOML has lists where torch wants tuples (betas)."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
