import pytest

from terashard.comm.layout import GROUPS, Coordinates, Layout
from terashard.errors import PlanError

LAYOUT = Layout(replicas=2, shards=3, stages=4)


def test_ranks_count_shards_first_then_stages_then_replicas() -> None:
    expected = [
        Coordinates(replica, shard, stage)
        for replica in range(2)
        for stage in range(4)
        for shard in range(3)
    ]
    assert [LAYOUT.coordinates(rank) for rank in range(24)] == expected
    assert [LAYOUT.rank(at) for at in expected] == list(range(24))


@pytest.mark.parametrize(
    ("group", "same"),
    [
        ("world", ()),
        ("data", ("stage",)),
        ("shard_gather", ("replica", "stage")),
        ("shard_reduce", ("replica", "stage")),
        ("replica", ("shard", "stage")),
        ("down", ("replica", "shard")),
        ("up", ("replica", "shard")),
    ],
)
def test_a_group_holds_exactly_the_ranks_that_agree_on_the_other_axes(
    group: str, same: tuple[str, ...]
) -> None:
    for rank in range(LAYOUT.size):
        here = LAYOUT.coordinates(rank)
        alike = [
            other
            for other in range(LAYOUT.size)
            if all(getattr(LAYOUT.coordinates(other), a) == getattr(here, a) for a in same)
        ]
        assert LAYOUT.members(group, rank) == tuple(alike)


def test_tie_joins_first_and_last_stage_of_one_replica_and_shard() -> None:
    assert LAYOUT.members("tie", 4) == (1, 10)
    assert Layout(stages=1, shards=2).members("tie", 1) == (1,)


def test_positions_down_and_up_are_stages() -> None:
    for rank in range(LAYOUT.size):
        stage = LAYOUT.coordinates(rank).stage
        assert LAYOUT.members("down", rank)[stage] == LAYOUT.members("up", rank)[stage] == rank


def test_an_unknown_group_and_an_empty_axis_are_refused() -> None:
    with pytest.raises(ValueError, match=", ".join(GROUPS)):
        LAYOUT.members("sideways", 0)
    with pytest.raises(PlanError, match="stages is 0; it must be at least 1"):
        Layout(stages=0)


@pytest.mark.parametrize("processes", [23, 25])
def test_another_number_of_processes_is_refused_with_the_numbers(processes: int) -> None:
    with pytest.raises(
        PlanError,
        match=f"{processes} processes were started, but 2 replicas x 4 stages x 3 shards need 24",
    ):
        LAYOUT.require(processes)
    LAYOUT.require(24)
