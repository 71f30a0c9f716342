r"""In which order the ranks gather and sum the units of one tree, agreed without a word where it can be.

Collectives of one group must be issued in the same order by all its ranks, but each rank runs its
own Python, which may skip a unit. So there is an agreed sequence for each *phase* (the gathers of a
forward pass, those of a backward pass, the sums of a backward pass): a rank that comes to a later
unit first takes part in everything before it, and at the end of the phase in what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from terashard.comm.group import Group
from terashard.shard.module_unit import ModuleUnit
from terashard.shard.param import ShardedParameter


class Turn:
    """The agreed sequences of one tree, and where this rank stands in them."""

    def __init__(self, units: Sequence[ModuleUnit]) -> None:
        self._units = tuple(units)

    def begin(self, phase: str) -> None:
        """A phase begins."""

    def reach(self, unit: ModuleUnit, phase: str) -> Sequence[ModuleUnit]:
        """The units in whose gathers this rank must take part before that of ``unit``."""
        return ()

    def rest(self, phase: str) -> Sequence[ModuleUnit]:
        """The units in whose gathers this rank must take part as the phase ends."""
        return ()

    def distance(self, unit: ModuleUnit) -> int:
        """How many gathers of the present phase come before that of ``unit``."""
        return 0

    def ready(self, unit: ModuleUnit) -> Sequence[ModuleUnit]:
        """The units whose sums are to be issued now that the gradient of ``unit`` is final."""
        return (unit,)

    def owed(self, done: Sequence[ModuleUnit]) -> Sequence[ModuleUnit]:
        """The units whose sums are still to be issued as the backward pass ends."""
        return [u for u in reversed(self._units) if u not in done and _takes_part(u)]

    def end(self) -> None:
        """A backward pass has ended."""

    def reset(self) -> None:
        """Forget where this rank stands."""

    def used_anywhere(self, units: Sequence[ModuleUnit]) -> Callable[[ShardedParameter], bool]:
        """Whether any rank had a gradient of a parameter of ``units``, once their sums are done.

        The counts travel in one sum per group; they are read only for parameters for which this
        rank had none, so a GPU is not waited for as long as all is used.
        """
        counts: dict[ShardedParameter, torch.Tensor] = {}
        for groups, members in _by_groups(units).items():
            flags = [(p, here) for unit in members for p, here in unit.landing.present.items()]
            if not flags:
                continue
            device = members[0].axes.device
            vector = torch.tensor([float(here) for _, here in flags], device=device)
            for group in groups:
                if group.size > 1:
                    group.sum(vector).wait()
            counts |= {p: vector[index] for index, (p, _) in enumerate(flags)}
        here = {p for unit in units for p, is_here in unit.landing.present.items() if is_here}
        return lambda p: p in here or bool(counts[p] > 0)


def _takes_part(unit: ModuleUnit) -> bool:
    return unit.rules.sums and unit.is_trainable


def _by_groups(units: Sequence[ModuleUnit]) -> dict[tuple[Group, Group], list[ModuleUnit]]:
    found: dict[tuple[Group, Group], list[ModuleUnit]] = {}
    for unit in units:
        if unit.axes.shards * unit.axes.replicas > 1:
            found.setdefault((unit.axes.shard_reduce, unit.axes.replica), []).append(unit)
    return found
