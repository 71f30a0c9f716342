"""The optimizer: any class of ``torch.optim`` that works element by element, on sharded parameters.

Groups: the first pattern of ``optimizer.groups`` that matches a parameter's global name decides; of
the rest, matrices decay, norms and biases do not. A weight that two stages share has one name, so
that both copies get the same options and stay equal.
"""

import inspect
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from terashard.config.schema import OptimizerConfig
from terashard.errors import ConfigError
from terashard.spec.model import ModelSpec

UNFIT: Mapping[str, str] = {
    "Adafactor": "keeps row and column means of whole parameters",
    "LBFGS": "computes the loss several times in one step",
    "Muon": "works on whole matrices",
    "Rprop": "writes through index lists, which sharded tensors refuse",
    "SparseAdam": "takes sparse gradients only",
}
"""Classes of ``torch.optim`` that do not run on shards, and why."""

FUSED = frozenset({"Adam", "AdamW"})
"""Classes whose fused kernel takes DTensors in torch 2.13; it saves most of what DTensors cost."""


def build_optimizer(
    config: OptimizerConfig, parameters: Iterable[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """The optimizer that ``config`` names, over (global name, parameter) pairs."""
    kind = _find(config.name)
    allowed = [name for name in inspect.signature(kind).parameters if name != "params"]
    for given in (config.options, *(group.options for group in config.groups)):
        _require_known(config.name, given, allowed)
    groups = _groups(config, parameters, decays="weight_decay" in allowed)
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
    for group in config.groups:
        if not any(fnmatchcase(name, group.match) for name in shapes):
            raise ConfigError(
                f"optimizer.groups: no parameter matches {group.match!r}; names are like"
                f" {', '.join([*shapes][:3])}"
            )
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


def _find(name: str) -> Any:
    kinds = {
        n: kind
        for n, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and n != "Optimizer"
    }
    if name in kinds and name not in UNFIT:
        return kinds[name]
    fit = ", ".join(sorted(kinds.keys() - UNFIT.keys()))
    if name in UNFIT:
        raise ConfigError(
            f"optimizer.name = {name!r} {UNFIT[name]}, but every rank holds only its rows of the"
            f" parameters; use one of {fit}"
        )
    raise ConfigError(f"optimizer.name = {name!r} is no class of torch.optim; use one of {fit}")


def _require_known(name: str, options: Mapping[str, Any], allowed: list[str]) -> None:
    for unknown in options.keys() - set(allowed):
        raise ConfigError(f"{name} has no option {unknown!r}; its options are {', '.join(allowed)}")
    if options.get("fused") and name not in FUSED:
        raise ConfigError(
            f"{name} cannot be fused on sharded parameters in this torch; leave the option out"
            f" (fused are {', '.join(sorted(FUSED))})"
        )


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
