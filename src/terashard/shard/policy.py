"""Which modules become units: by class, by size, or by a function of one's own.

``shard_where`` applies ``fully_shard`` to the chosen modules, inner ones first, and to the module
itself. Units of some megabytes, all alike, are what communicates best; one unit that holds most of
the parameters saves nothing, and is warned of.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from terashard.errors import ConfigError
from terashard.shard.api import fully_shard
from terashard.shard.tree import sharding_of, shardings_in
from terashard.units import show_bytes

Choice = Callable[[str, nn.Module], bool]


class UnevenUnitsWarning(UserWarning):
    """One unit holds more than half of the parameters."""


def of_class(*classes: type[nn.Module]) -> Choice:
    """Choose the modules of these classes: the blocks of a Transformer, usually."""
    return lambda _, module: isinstance(module, classes)


def of_size(least: int) -> Choice:
    """Choose the smallest modules that hold ``least`` elements or more outside inner choices."""
    return lambda _, module: _is_large(module, _outside(module, least), least)


def shard_where(module: nn.Module, choose: Choice, **arguments: Any) -> nn.Module:
    """Shard the modules inside ``module`` that ``choose(name, module)`` wants, and ``module``.

    ``arguments`` are those of ``fully_shard``. Returns ``module``. Raises ``ConfigError`` if
    nothing inside was chosen: then nothing would be saved.
    """
    found = [(name, child) for name, child in _inner_first("", module) if child is not module]
    chosen = [child for name, child in found if choose(name, child)]
    if not chosen:
        raise ConfigError(
            f"no module inside this {type(module).__name__} was chosen to be a unit, so all its"
            " parameters would be full at once; choose its blocks, by class or by size"
        )
    for child in chosen:
        if sharding_of(child) is None:
            fully_shard(child, **arguments)
    fully_shard(module, **arguments)
    _warn_of_uneven(module)
    return module


def describe_units(module: nn.Module) -> str:
    """A table of the units of ``module``: name, parameters, bytes when full, share of all."""
    rows = _sizes(module)
    total = sum(count for _, count, _ in rows) or 1
    lines = [f"{'unit':32} {'parameters':>12} {'full':>10} {'share':>6}"]
    lines += [
        f"{name:32} {count:>12,} {show_bytes(size):>10} {count / total:>6.0%}"
        for name, count, size in rows
    ]
    return "\n".join(lines)


def _sizes(module: nn.Module) -> list[tuple[str, int, int]]:
    names = {child: name for name, child in module.named_modules()}
    return [
        (
            " + ".join(names.get(one) or "root" for one in sharding.modules),
            sum(p.form.shape.numel() for p in unit.parameters),
            unit.full_bytes,
        )
        for sharding in shardings_in(module)
        for unit in sharding.units
    ]


def _warn_of_uneven(module: nn.Module) -> None:
    rows = _sizes(module)
    total = sum(count for _, count, _ in rows)
    name, most, size = max(rows, key=lambda row: row[1])
    if len(rows) > 1 and most > total / 2:
        warnings.warn(
            f"unit {name} holds {most / total:.0%} of the parameters ({show_bytes(size)} when"
            " full), so sharding saves little memory; make more modules inside it units",
            UnevenUnitsWarning,
            stacklevel=3,
        )


def _inner_first(name: str, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _inner_first(f"{name}.{child_name}" if name else child_name, child)
    yield name, module


def _outside(module: nn.Module, least: int) -> set[nn.Parameter]:
    """The parameters of ``module`` that are in no module inside it which is large by itself."""
    found = set(module.parameters(recurse=False))
    for child in module.children():
        rest = _outside(child, least)
        if not _is_large(child, rest, least):
            found |= rest
    return found


def _is_large(module: nn.Module, parameters: set[nn.Parameter], least: int) -> bool:
    runs = type(module).forward is not nn.Module.forward
    return runs and sum(p.numel() for p in parameters) >= least
