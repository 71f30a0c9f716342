"""Random grids and schedules for hypothesis, and the lists that tests share."""

from hypothesis import settings
from hypothesis import strategies as st

from terashard.schedule.actions import Backward, Cell, Forward, Grid, MicroBatch, Over, Placement
from terashard.schedule.lower import insert_sharding, insert_transfers, split_at_units
from terashard.schedule.orders import ORDERS
from terashard.schedule.schedule import Schedule, Unit

SAME_EVERY_TIME = settings(derandomize=True, deadline=None, max_examples=40)

lengths = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple)
micro_batches = st.builds(MicroBatch, st.integers(1, 2), lengths)
partitions = st.lists(micro_batches, min_size=1, max_size=4).map(tuple)
grids = st.builds(Grid, ranks=st.integers(1, 5), partition=partitions)
uniform_grids = st.builds(Grid.uniform, st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
placements = st.sampled_from(["looped", "v"])


@st.composite
def virtual_grids(draw: st.DrawFn) -> Grid:
    """Grids of several chunks per rank, in both placements."""
    placement: Placement = draw(placements)
    ranks, chunks = draw(st.integers(1, 3)), draw(st.integers(2, 3))
    return Grid(ranks=ranks, partition=draw(partitions), chunks=chunks, placement=placement)


@st.composite
def unit_lists(draw: st.DrawFn, grid: Grid) -> tuple[tuple[Unit, ...], ...]:
    """Units of every stage: with or without replicas, a tie, a head, sums per micro-batch."""
    each = st.booleans()
    sums: tuple[Over, ...] = draw(st.sampled_from([("shard",), ("shard", "replica")]))
    stages = [
        [
            Unit(f"layers.{s}.{i}", sums, each_micro=draw(each))
            for i in range(draw(st.integers(1, 3)))
        ]
        for s in range(grid.num_stages)
    ]
    tied = draw(st.booleans()) and grid.ranks > 1
    ends = (*sums, "tie") if tied else sums
    stages[0][0] = Unit("embed", ends, each_micro=draw(each))
    if tied or draw(st.booleans()):
        borrows = ("embed",) if grid.num_stages == 1 and draw(st.booleans()) else ()
        head = draw(st.booleans())
        stages[-1].append(Unit("head", ends, head, borrows, each_micro=draw(each)))
    return tuple(map(tuple, stages))


@st.composite
def cuts_of(
    draw: st.DrawFn, grid: Grid, units: tuple[tuple[Unit, ...], ...]
) -> dict[Cell, tuple[int, ...]]:
    """Some cells, cut at some of the boundaries between the units of their stage."""
    cuts = {}
    for stage in range(grid.num_stages):
        for cell in grid.cells(stage):
            inside = range(1, len(units[stage]))
            at = draw(st.sets(st.sampled_from(inside))) if inside else set()
            if at:
                cuts[cell] = tuple(sorted(at))
    return cuts


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Whole schedules: any order, partition, units and cuts, with transfers and sharding."""
    grid = draw(grids)
    units = draw(unit_lists(grid))
    bare = draw(st.sampled_from(sorted(ORDERS)).map(ORDERS.__getitem__))(grid)
    cut = split_at_units(bare, draw(cuts_of(grid, units)))
    return insert_sharding(insert_transfers(cut), units)


def stage_after_stage(grid: Grid) -> Schedule:
    """Fill and drain for any number of chunks per rank: lower stages first, back in reverse."""
    programs = []
    for rank in range(grid.ranks):
        cells = [cell for stage in grid.stages_of(rank) for cell in grid.cells(stage)]
        programs.append([*map(Forward, cells), *map(Backward, reversed(cells))])
    return Schedule.of(grid, programs)
