"""What a list will ask of a rank's groups, counted before anything runs.

Bytes are those of the tensors that are handed to a group of several ranks. In *model volumes*, the
stage's parameters once, the floor of a step is 2: one gather and one reduction of everything.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from terashard.schedule.actions import Gather, Over, Reduce
from terashard.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class UnitElements:
    """Elements of one unit's own parameters that travel."""

    gathered: int
    summed: int
    """Of those that train: in full, over shards."""
    rows: int
    """Of those that train: the flat buffer of this rank's rows, over replicas."""
    tied: int
    """Of those that are tied to another stage: this rank's rows."""

    def over(self, axis: Over) -> int:
        """Elements that a reduction over ``axis`` hands to its group."""
        return {"shard": self.summed, "replica": self.rows, "tie": self.tied}[axis]


@dataclass(frozen=True, slots=True)
class PlannedTraffic:
    """Of one rank and step."""

    gathers: int
    reductions: int
    """Over any axis."""
    gathered_bytes: int
    reduced_bytes: int
    """In the format in which gradients are kept."""
    volumes: float
    """Elements gathered, and reduced over shards, over those of the stage."""


def planned_traffic(
    schedule: Schedule,
    rank: int,
    elements: Mapping[str, UnitElements],
    *,
    among: Collection[Over],
    compute: int,
    master: int,
) -> PlannedTraffic:
    """Count the list of ``rank``.

    ``elements`` is by name of unit. ``among`` are the axes along which this rank is not alone.
    ``compute`` and ``master`` are bytes per element of full parameters and of gradients.
    """
    units = {
        (stage, index): elements[unit.name]
        for stage in schedule.grid.stages_of(rank)
        for index, unit in enumerate(schedule.units[stage])
    }
    gathers, reductions, gathered, over_shards, reduced = 0, 0, 0, 0, 0
    for action in schedule.actions(rank):
        match action:
            case Gather(unit):
                gathers += 1
                gathered += units[unit.stage, unit.index].gathered
            case Reduce(unit, over):
                reductions += 1
                travelling = units[unit.stage, unit.index].over(over)
                over_shards += travelling if over == "shard" else 0
                reduced += travelling if over in among else 0
            case _:
                pass
    return PlannedTraffic(
        gathers=gathers,
        reductions=reductions,
        gathered_bytes=gathered * compute if "shard" in among else 0,
        reduced_bytes=reduced * master,
        volumes=(gathered + over_shards) / max(1, sum(unit.gathered for unit in units.values())),
    )
