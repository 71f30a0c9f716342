import dataclasses
import time

import pytest
import torch.distributed as dist

from terashard.comm.alone import AloneGroup
from terashard.comm.layout import Layout
from terashard.comm.mesh import Mesh
from terashard.comm.ping import Link, links, ping, summing
from terashard.errors import CommunicationError
from tests.helpers.processes import run_processes
from tests.helpers.threads import run_mesh


def test_links_are_the_pairs_that_exchange_data() -> None:
    def run(mesh: Mesh) -> set[tuple[str, int, bool, bool]]:
        return {(link.name, link.rank, link.sends, link.receives) for link in links(mesh)}

    found = run_mesh(run, replicas=2, shards=1, stages=3)
    assert found[1] == {  # the middle stage of replica 0
        ("down", 0, False, True),
        ("up", 0, True, False),
        ("down", 2, True, False),
        ("up", 2, False, True),
    }
    # what one rank sends, the other receives
    for rank, mine in enumerate(found):
        for name, peer, sends, receives in mine:
            assert (name, rank, receives, sends) in found[peer]


def test_every_group_of_collectives_is_tried_in_one_order() -> None:
    # A message inside such a group made NCCL build a communicator that nothing used again, and the
    # group's own stayed untried; "world" and "data", which every step sums over, were left out.
    def run(mesh: Mesh) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, group.ranks) for name, group in summing(mesh)]

    found = run_mesh(run, replicas=2, shards=2, stages=2)
    assert found[0] == [
        ("world", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("data", (0, 1, 4, 5)),
        ("shard_gather", (0, 1)),
        ("shard_reduce", (0, 1)),
        ("replica", (0, 4)),
        ("tie", (0, 2)),
    ]
    assert run_mesh(run, shards=1, stages=1) == [[]]


@pytest.mark.parametrize(
    "name", ["world", "data", "shard_gather", "shard_reduce", "replica", "tie"]
)
def test_a_group_that_one_rank_does_not_enter_is_found(name: str) -> None:
    def run(mesh: Mesh) -> str:
        if mesh.rank == 2:  # of stage 1, so it sums in the tie too
            alone = AloneGroup(mesh.rank)
            ping(dataclasses.replace(mesh, **{name: alone}), timeout=5)
            return ""
        try:
            ping(mesh, timeout=0.3)
        except CommunicationError as error:
            return str(error)
        return ""

    messages = run_mesh(run, replicas=2, shards=2, stages=2)
    members = Layout(replicas=2, shards=2, stages=2).members(name, 2)
    assert {r for r, said in enumerate(messages) if f"in group {name!r}" in said} == {
        rank for rank in members if rank != 2
    }


@pytest.mark.parametrize(("replicas", "shards", "stages"), [(1, 1, 1), (2, 2, 2), (1, 3, 3)])
def test_ranks_that_are_all_there_reach_each_other(replicas: int, shards: int, stages: int) -> None:
    run_mesh(ping, replicas=replicas, shards=shards, stages=stages)


def test_a_missing_rank_is_named_with_its_coordinates() -> None:
    def run(mesh: Mesh) -> str:
        if mesh.rank == 3:
            return ""
        with pytest.raises(CommunicationError) as caught:
            ping(mesh, timeout=0.2)
        return str(caught.value)

    messages = run_mesh(run, shards=1, stages=4)
    # Ranks 0 and 3 tie weights: the smallest group says best who is missing.
    assert "cannot reach rank 3 (replica 0, stage 3, shard 0) in group 'tie'" in messages[0]
    assert "cannot reach all of ranks 0, 2, 3 in group 'world'" in messages[1]
    assert messages[2].startswith(
        "rank 2 (replica 0, stage 2, shard 0) cannot reach"
        " rank 3 (replica 0, stage 3, shard 0) in group 'up' within 0.2 s: is each process running"
    )


def test_a_group_of_many_that_nobody_else_enters_is_named_with_its_ranks() -> None:
    def run(mesh: Mesh) -> str:
        if mesh.rank:
            return ""
        with pytest.raises(CommunicationError) as caught:
            ping(mesh, timeout=0.1)
        return str(caught.value)

    assert run_mesh(run, shards=3)[0].startswith(
        "rank 0 (replica 0, stage 0, shard 0) cannot reach all of ranks 1, 2 in group 'world'"
    )


def test_ranks_that_disagree_about_who_they_are_are_refused() -> None:
    def run(mesh: Mesh) -> None:
        wrong = mesh if mesh.rank == 0 else dataclasses.replace(mesh, rank=7)
        ping(wrong, timeout=5)

    for axes in ({"shards": 1, "stages": 2}, {"shards": 3}):
        with pytest.raises(CommunicationError, match="the processes disagree about their ranks"):
            run_mesh(run, **axes)


def test_a_link_names_the_global_rank_of_its_peer() -> None:
    def run(mesh: Mesh) -> int:
        return Link("down", mesh.down, 1).rank

    assert run_mesh(run, shards=2, stages=2) == [2, 3, 2, 3]


def _ping_and_miss(rank: int) -> str:
    mesh = Mesh.of_processes(shards=1, stages=2, timeout=20)
    ping(mesh, timeout=20)
    ping(mesh, timeout=20)
    store = dist.distributed_c10d._get_default_store()
    message = ""
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(CommunicationError) as caught:
            ping(mesh, timeout=0.3)
        assert time.monotonic() - start < 5
        message = str(caught.value)
        store.set("told", "yes")
    else:
        store.get("told")
    dist.destroy_process_group()
    return message


@pytest.mark.processes
def test_processes_reach_each_other_and_a_silent_one_is_named() -> None:
    message = run_processes(2, _ping_and_miss)[0]
    assert message.startswith(
        "rank 0 (replica 0, stage 0, shard 0) cannot reach rank 1 (replica 0, stage 1, shard 0)"
    )
    assert "\n" not in message
