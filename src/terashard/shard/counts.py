"""Who had a gradient: counted over the ranks when a backward pass ends.

A parameter for which no rank had one gets none, as in one process. A unit that was summed before
all of its gradient had come, on any rank, is summed once more by all.

All counts of units that go over the same groups travel in one sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from terashard.comm.group import Group
from terashard.shard.module_unit import ModuleUnit
from terashard.shard.param import ShardedParameter


@dataclass(frozen=True, slots=True)
class Counts:
    """What the ranks told of some units; others are as this rank knows them."""

    used: dict[ShardedParameter, bool]
    late: frozenset[ModuleUnit]

    @classmethod
    def of(cls, units: Sequence[ModuleUnit]) -> Counts:
        """Ask all ranks that hold parts of ``units``; all of them must ask."""
        used: dict[ShardedParameter, bool] = {}
        late: set[ModuleUnit] = set()
        for groups, members in _by_groups(units).items():
            summed = [(unit, p) for unit in members for p in unit.landing.summed]
            parameters = [p for _, p in summed]
            told = [float(unit.landing.present.get(p, False)) for unit, p in summed]
            told += [float(unit.landing.waits) for unit in members]
            vector = torch.tensor(told, device=members[0].axes.device)
            for group in groups:
                if group.size > 1:
                    group.sum(vector).wait()
            found = vector.tolist()
            used |= {p: count > 0 for p, count in zip(parameters, found, strict=False)}
            late |= {u for u, n in zip(members, found[len(parameters) :], strict=True) if n > 0}
        return cls(used, frozenset(late))

    def had(self, p: ShardedParameter, *, here: bool) -> bool:
        """Whether any rank had a gradient of ``p``."""
        return here or self.used.get(p, False)


def _by_groups(units: Sequence[ModuleUnit]) -> dict[tuple[Group, Group], list[ModuleUnit]]:
    found: dict[tuple[Group, Group], list[ModuleUnit]] = {}
    for unit in units:
        if unit.sums:
            found.setdefault((unit.axes.shard_reduce, unit.axes.replica), []).append(unit)
    return found
