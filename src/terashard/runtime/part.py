"""One rank's part of a schedule, with what follows from the schedule before anything has run.

Two things are read off the list once, and not asked again in every step:

*First uses.* A gathered unit is waited for by the first action that reads it.

*Acknowledgements.* A message from another rank tells which of this rank's messages it had taken by
then: those that it receives before the send in its own list. Their buffers may go as soon as that
message is here, without asking the transport, and at no cost::

    rank 0   S0.0.0>1  S0.0.1>1  R0.0.1<1             R0.0.1<1 acknowledges both sends
    rank 1   R1.0.0<0  R1.0.1<0  S1.0.1>0
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from terashard.schedule.actions import (
    WAYS,
    Action,
    Backward,
    Cell,
    Forward,
    Gather,
    Receive,
    Send,
    UnitKey,
    Way,
)
from terashard.schedule.needs import units_used
from terashard.schedule.schedule import Schedule

Sent: TypeAlias = tuple[Cell, int]
"""Cell and receiving stage of a send: which message it was."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What ``rank`` does in ``schedule``."""

    schedule: Schedule
    rank: int
    actions: tuple[Action, ...]
    first_uses: tuple[tuple[UnitKey, ...], ...]
    """For every action, the units that it is the first to read after their gathering."""
    receives: Mapping[Way, tuple[Receive, ...]]
    """In order: of activations, which go down, and of gradients, which go up."""
    acknowledged: Mapping[Receive, tuple[Sent, ...]]
    """For every receive, the sends that the other rank had taken since its message before."""
    trained: tuple[UnitKey, ...]
    """The units of this rank that get gradients."""

    @classmethod
    def of(cls, schedule: Schedule, rank: int) -> "Part":
        """Read off everything."""
        actions = tuple(schedule.actions(rank))
        receives = [action for action in actions if isinstance(action, Receive)]
        return cls(
            schedule=schedule,
            rank=rank,
            actions=actions,
            first_uses=tuple(_first_uses(schedule, actions)),
            receives={way: tuple(r for r in receives if r.way == way) for way in WAYS},
            acknowledged=_acknowledged(schedule, rank, receives),
            trained=tuple(_trained(schedule, rank)),
        )


def _first_uses(schedule: Schedule, actions: Iterable[Action]) -> Iterator[tuple[UnitKey, ...]]:
    arriving: set[UnitKey] = set()
    for action in actions:
        found: tuple[UnitKey, ...] = ()
        match action:
            case Gather(unit):
                arriving.add(unit)
            case Forward(cell) | Backward(cell):
                used = (UnitKey(cell.stage, index) for index in units_used(schedule, action))
                found = tuple(unit for unit in used if unit in arriving)
                arriving.difference_update(found)
            case _:
                pass
        yield found


def _trained(schedule: Schedule, rank: int) -> Iterator[UnitKey]:
    if schedule.training and schedule.units:
        for stage in schedule.grid.stages_of(rank):
            for index, unit in enumerate(schedule.units[stage]):
                if unit.reductions:
                    yield UnitKey(stage, index)


def _acknowledged(
    schedule: Schedule, rank: int, receives: Iterable[Receive]
) -> dict[Receive, tuple[Sent, ...]]:
    rank_of = schedule.grid.rank_of
    found: dict[Receive, tuple[Sent, ...]] = {}
    for other in {rank_of(receive.source) for receive in receives}:
        taken: list[Sent] = []
        for action in schedule.actions(other):
            match action:
                case Receive() if rank_of(action.source) == rank:
                    send = action.send()
                    taken.append((send.cell, send.to))
                case Send() if rank_of(action.to) == rank:
                    found[action.receive()] = tuple(taken)
                    taken = []
                case _:
                    pass
    return found
