"""From the cells of an order to the checked list of everything: the lowerings in their order."""

from collections.abc import Mapping, Sequence

from terashard.schedule.actions import Cell
from terashard.schedule.budget import Budget, plan_moves
from terashard.schedule.check import check
from terashard.schedule.lower import (
    insert_sharding,
    insert_transfers,
    last_backward_cuts,
    split_at_units,
)
from terashard.schedule.schedule import Schedule, Unit


def lowered(
    bare: Schedule,
    units: Sequence[Sequence[Unit]],
    *,
    budget: Budget | None = None,
    early_sums: bool = False,
) -> Schedule:
    """``bare`` with transfers and, if there are ``units``, with sharding, checked.

    Under a ``budget`` units are gathered and released in between. With ``early_sums`` the last
    backward cell of a stage is cut, so that gradients travel while the rest of it runs.
    """
    moves, cuts = None, {}
    if units and budget is not None:
        known = bare.with_actions([list(p) for p in bare], units=tuple(map(tuple, units)))
        moves = plan_moves(known, budget)
        cuts = moves.cuts(known)
    if units and early_sums:
        cuts = _joined(cuts, last_backward_cuts(bare, units))
    schedule = insert_transfers(split_at_units(bare, cuts))
    if units:
        schedule = insert_sharding(schedule, units, moves)
    check(schedule)
    return schedule


def _joined(
    some: Mapping[Cell, tuple[int, ...]], others: Mapping[Cell, tuple[int, ...]]
) -> dict[Cell, tuple[int, ...]]:
    """The cuts of both."""
    return {
        cell: tuple(sorted({*some.get(cell, ()), *others.get(cell, ())}))
        for cell in {**some, **others}
    }
