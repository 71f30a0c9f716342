"""Who stands in whom: what is sharded in a tree, whose modules are whose, and its root."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

from terashard.shard.root import Root

if TYPE_CHECKING:
    from terashard.shard.hooks import Sharding


def sharding_of(module: nn.Module) -> Sharding | None:
    """What ``fully_shard`` knows of ``module``, or None if it was not sharded itself."""
    found: Sharding | None = module.__dict__.get("_sharding")
    return found


def shardings_in(module: nn.Module) -> list[Sharding]:
    """What is sharded in the tree of ``module``, in order of registration, each once."""
    found = (sharding_of(child) for child in module.modules())
    return list(dict.fromkeys(sharding for sharding in found if sharding is not None))


def managed(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose tensors belong to one call on ``modules``: not those of an inner call.

    Each once, with its name inside the one that it stands in.
    """
    seen: set[nn.Module] = set(modules)

    def walk(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        yield prefix, module
        for name, child in module.named_children():
            if child not in seen and sharding_of(child) is None:
                seen.add(child)
                yield from walk(f"{prefix}.{name}" if prefix else name, child)

    for module in modules:
        yield from walk("", module)


def plant(module: nn.Module, found: Sequence[Sharding]) -> None:
    """Make ``module`` the root of its tree, in which ``found`` are sharded, its own first."""
    mine = found[0]
    for unit in mine.units:
        if unit.rules.reshard_after_forward is None:
            unit.rules.reshard_after_forward, unit.rules.is_default = False, True
    units = [unit for s in found for unit in s.units]
    _name(module, found)
    parents = {
        unit.name: [one.name for other in found if _below(other, s) for one in other.units]
        for s in found
        for unit in s.units
    }
    root = Root(units, parents, mine.pool)
    root.shardings = list(found)
    for sharding in found:
        sharding.root, sharding.is_root = root, sharding is mine


def _name(top: nn.Module, shardings: Sequence[Sharding]) -> None:
    """Name units and parameters as they are called from the root."""
    names = {module: name for name, module in top.named_modules()}
    taken = set(names.values())
    for sharding in shardings:
        here = names.get(sharding.modules[0], "") or _other("root", taken)
        for index, unit in enumerate(sharding.units):
            unit.rename(here if index == 0 else _other(f"{here}#{index}", taken))
            for p in unit.parameters:
                prefix = names.get(p.places[0].module, "")
                attribute = p.places[0].attribute
                p.name = f"{prefix}.{attribute}" if prefix else attribute


def _below(upper: Sharding, lower: Sharding) -> bool:
    """Whether a module of ``lower`` stands inside one of ``upper``."""
    return upper is not lower and any(
        inner is child
        for outer in upper.modules
        for inner in lower.modules
        for child in outer.modules()
    )


def _other(name: str, taken: set[str]) -> str:
    """``name``, in brackets if a module is called so."""
    return f"<{name}>" if name in taken else name
