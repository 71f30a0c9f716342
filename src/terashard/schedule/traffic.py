"""What a list will ask of the groups of shards, counted before anything runs.

Bytes are those of the full tensors that are handed to a group of several. In *model volumes*, the
stage's parameters once, the floor of a step is 2: one gather and one reduction of everything.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from terashard.schedule.actions import Gather, Reduce
from terashard.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class PlannedTraffic:
    """Of one rank and step."""

    gathers: int
    reductions: int
    """Over shards."""
    gathered_bytes: int
    reduced_bytes: int
    """Over shards, in the format in which gradients are kept."""
    volumes: float
    """Gathered and reduced elements, over those of the stage."""


def planned_traffic(
    schedule: Schedule, rank: int, numels: Mapping[str, int], *, compute: int, master: int
) -> PlannedTraffic:
    """Count the list of ``rank``.

    ``numels`` has the elements of every unit's own parameters; ``compute`` and ``master`` are bytes
    per element of full parameters and of gradients.
    """
    stages = schedule.grid.stages_of(rank)
    whole = sum(numels[unit.name] for stage in stages for unit in schedule.units[stage])
    gathered, summed = [], []
    for action in schedule.actions(rank):
        match action:
            case Gather(unit):
                gathered.append(numels[schedule.units[unit.stage][unit.index].name])
            case Reduce(unit, "shard"):
                summed.append(numels[schedule.units[unit.stage][unit.index].name])
            case _:
                pass
    return PlannedTraffic(
        gathers=len(gathered),
        reductions=len(summed),
        gathered_bytes=sum(gathered) * compute,
        reduced_bytes=sum(summed) * master,
        volumes=(sum(gathered) + sum(summed)) / whole,
    )
