"""Orders: from a grid to the cells that every rank computes, in order.

No transfers and no parameters: ``lower.py`` puts them in. Inside a sequence every order runs
forward cells from the first slice to the last and backward cells from the last to the first,
because later slices owe gradients to earlier ones.
"""

from collections.abc import Callable, Iterator

from terashard.errors import ScheduleError
from terashard.schedule.actions import Action, Backward, Cell, Forward, Grid
from terashard.schedule.schedule import Schedule

Order = Callable[[Grid], Schedule]


def fill_drain(grid: Grid) -> Schedule:
    """All forward cells, then all backward cells in reverse.

    Source: TeraPipe (arXiv:2102.07988). With one slice per sequence it is GPipe.
    """
    _one_chunk(grid, "fill_drain")
    programs: list[list[Action]] = []
    for rank in range(grid.ranks):
        cells = grid.cells(rank)
        programs.append([*map(Forward, cells), *map(Backward, reversed(cells))])
    return Schedule.of(grid, programs)


def one_forward_one_backward(grid: Grid) -> Schedule:
    """One forward cell, one backward cell, after as few forwards as keep the pipe busy.

    Micro-batches run backward in the order in which they came, the slices of each from last to
    first. Of ``p`` ranks, rank ``s`` has run ``n - 1 + p - s`` forward cells before its first
    backward cell, ``n`` being the slices of the first micro-batch; so ``min(n·m, n + p - 1)/n`` of
    ``m`` equal sequences are live on rank 0.

    Source: Seq1F1B (arXiv:2406.03488). With one slice per sequence it is 1F1B.
    """
    _one_chunk(grid, "one_forward_one_backward")
    return Schedule.of(grid, [list(_alternate(grid, rank)) for rank in range(grid.ranks)])


def forward_only(grid: Grid) -> Schedule:
    """Every forward cell and nothing else, for evaluation."""
    _one_chunk(grid, "forward_only")
    programs = [map(Forward, grid.cells(rank)) for rank in range(grid.ranks)]
    return Schedule.of(grid, programs, training=False)


ORDERS: dict[str, Order] = {
    "fill_drain": fill_drain,
    "one_forward_one_backward": one_forward_one_backward,
}
"""Orders that a plan may name."""


def _alternate(grid: Grid, rank: int) -> Iterator[Action]:
    forwards = grid.cells(rank)
    behind = grid.ranks - 1 - rank
    warm_up = grid.num_slices[0] - 1 + behind
    done, before = 0, 0
    for backward, (cell, arrived) in enumerate(_backward_cells(grid, rank)):
        wanted = max(warm_up + backward + 1, arrived + behind)
        before = min(wanted, len(forwards))
        yield from map(Forward, forwards[done:before])
        done = max(done, before)
        yield Backward(cell)


def _backward_cells(grid: Grid, rank: int) -> Iterator[tuple[Cell, int]]:
    """Backward cells in order, each with the number of forward cells that end its micro-batch."""
    arrived = 0
    for micro, slices in enumerate(grid.num_slices):
        arrived += slices
        for index in reversed(range(slices)):
            yield Cell(rank, micro, index), arrived


def _one_chunk(grid: Grid, order: str) -> None:
    if grid.chunks != 1:
        raise ScheduleError(f"order {order} has one chunk per rank, but the grid has {grid.chunks}")
