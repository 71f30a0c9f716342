"""What torch.optim has, without importing it, which takes seconds: classes and their options.

The table is that of torch 2.13; a test compares it with the signatures of the installed torch.
"""

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from terashard.config.schema import OptimizerConfig
from terashard.errors import ConfigError

_COMMON = ("lr", "weight_decay", "maximize", "foreach", "differentiable")
_MOMENTS = (*_COMMON, "betas", "eps", "capturable")

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "ASGD": (*_COMMON, "lambd", "alpha", "t0", "capturable"),
    "Adadelta": (*_COMMON, "rho", "eps", "capturable"),
    "Adagrad": (*_COMMON, "lr_decay", "initial_accumulator_value", "eps", "fused"),
    "Adam": (*_MOMENTS, "amsgrad", "fused", "decoupled_weight_decay"),
    "AdamW": (*_MOMENTS, "amsgrad", "fused"),
    "Adamax": _MOMENTS,
    "NAdam": (*_MOMENTS, "momentum_decay", "decoupled_weight_decay"),
    "RAdam": (*_MOMENTS, "decoupled_weight_decay"),
    "RMSprop": (*_COMMON, "alpha", "eps", "momentum", "centered", "capturable"),
    "SGD": (*_COMMON, "momentum", "dampening", "nesterov", "fused"),
}
"""Classes that run on shards, and what they may be told."""

UNFIT: Mapping[str, str] = {
    "Adafactor": "keeps row and column means of whole parameters",
    "LBFGS": "computes the loss several times in one step",
    "Muon": "works on whole matrices",
    "Rprop": "writes through index lists, which sharded tensors refuse",
    "SparseAdam": "takes sparse gradients only",
}
"""Classes that do not run on shards, and why."""

FUSED = frozenset({"Adam", "AdamW"})
"""Classes whose fused kernel takes DTensors in torch 2.13; it saves most of what DTensors cost."""


def require_known(config: OptimizerConfig) -> None:
    """Refuse a class that is unknown or does not run on shards, and options that it has not."""
    name, fit = config.name, ", ".join(OPTIONS)
    if name in UNFIT:
        raise ConfigError(
            f"optimizer.name = {name!r} {UNFIT[name]}, but every rank holds only its rows of the"
            f" parameters; use one of {fit}"
        )
    if name not in OPTIONS:
        raise ConfigError(f"optimizer.name = {name!r} is no class of torch.optim; use one of {fit}")
    for given in (config.options, *(group.options for group in config.groups)):
        _require_options(name, given)


def require_matches(config: OptimizerConfig, names: Collection[str]) -> None:
    """Refuse a group that none of the parameters ``names`` is in."""
    for group in config.groups:
        if not any(fnmatchcase(name, group.match) for name in names):
            raise ConfigError(
                f"optimizer.groups: no parameter matches {group.match!r}; names are like"
                f" {', '.join([*names][:3])}"
            )


def _require_options(name: str, options: Mapping[str, Any]) -> None:
    for unknown in sorted(options.keys() - set(OPTIONS[name])):
        allowed = ", ".join(OPTIONS[name])
        raise ConfigError(f"{name} has no option {unknown!r}; its options are {allowed}")
    if options.get("fused") and name not in FUSED:
        raise ConfigError(
            f"{name} cannot be fused on sharded parameters in this torch; leave the option out"
            f" (fused are {', '.join(sorted(FUSED))})"
        )
