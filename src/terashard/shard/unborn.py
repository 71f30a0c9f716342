"""Which modules of a tree still lack values, and in which order a tree was built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from terashard.shard.hooks import Sharding


def unborn_modules(module: nn.Module, shardings: Sequence[Sharding]) -> set[nn.Module]:
    """The modules that have a tensor without values, and those that have none of their own.

    But of the latter not those below which everything has values: they might write it again.
    """
    lacking: set[nn.Module] = set()
    for sharding in shardings:
        for unit in sharding.units:
            unit.adopt()
            lacking |= {
                place.module for p in unit.parameters if not p.written for place in p.places
            }
    lacking |= {m for m in module.modules() if any(tensor.is_meta for tensor in _own(m))}
    return lacking | {
        m
        for m in module.modules()
        if not _own(m)
        and (any(b in lacking for b in m.modules()) or not any(map(_own, m.modules())))
    }


def children_first(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of a tree, each once, as constructors finish: children before their parent."""
    seen: set[nn.Module] = set()

    def walk(one: nn.Module) -> Iterator[nn.Module]:
        if one in seen:
            return
        seen.add(one)
        for child in one.children():
            yield from walk(child)
        yield one

    yield from walk(module)


def _own(module: nn.Module) -> list[Tensor]:
    found = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in found if tensor is not None]
