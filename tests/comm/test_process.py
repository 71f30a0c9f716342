"""Each test starts its processes once and checks many claims in them."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from terashard.comm.collectives import CollectiveGroup, group_over
from terashard.comm.gloo import GlooGroup
from terashard.comm.nccl import NcclGroup
from terashard.comm.process import explained
from terashard.errors import CommunicationError
from tests.comm.claims import exchange_everything
from tests.helpers.processes import run_processes

pytestmark = pytest.mark.processes


def _all() -> tuple[dist.ProcessGroup, tuple[int, ...]]:
    world = dist.group.WORLD
    assert world is not None
    return world, tuple(range(dist.get_world_size()))


def _exchange(rank: int) -> None:
    handle, ranks = _all()
    exchange_everything(GlooGroup(handle, ranks, "all"))
    large, small = torch.zeros(900, 100), [torch.zeros(8, 3) for _ in range(9)]
    work = GlooGroup(handle, ranks, "all").gather_rows([large, *small])
    assert len(work.works) == 2 * 2 * (len(ranks) - 1)  # out and in, large and packed, per peer
    work.wait()


@pytest.mark.parametrize("size", [2, 3])
def test_every_exchange_over_gloo_gives_what_its_definition_says(size: int) -> None:
    run_processes(size, _exchange)


def _exchange_by_collectives(rank: int) -> None:
    handle, ranks = _all()
    exchange_everything(_Collectives(handle, ranks, "all"), rank_order=len(ranks) == 2)


class _Collectives(NcclGroup):
    """The calls of NCCL's group, carried by gloo."""

    def barrier(self) -> None:
        GlooGroup.barrier(self)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [2, 3])
def test_the_collectives_meant_for_nccl_give_the_same(size: int) -> None:
    run_processes(size, _exchange_by_collectives)


def _exchange_plainly(rank: int) -> None:
    handle, ranks = _all()
    exchange_everything(CollectiveGroup(handle, ranks, "all"))


@pytest.mark.parametrize("size", [2, 3])
def test_groups_of_any_backend_give_the_same(size: int) -> None:
    run_processes(size, _exchange_plainly)


def _made_without_naming_a_backend(rank: int, path: str) -> str:
    dist.destroy_process_group()
    dist.init_process_group(init_method=f"file://{path}", rank=rank, world_size=2)
    handle, _ = _all()
    group = group_over(handle, "all")
    total = torch.ones(3)
    group.sum(total).wait()
    assert total.tolist() == [2.0] * 3
    return type(group).__name__


def test_a_world_whose_backend_nobody_named_goes_the_fastest_way(tmp_path: Path) -> None:
    found = run_processes(2, _made_without_naming_a_backend, str(tmp_path / "meet"))
    assert found == ["GlooGroup", "GlooGroup"]


def _fail(rank: int) -> None:
    if rank == 1:
        raise KeyError("broken")
    dist.barrier()


def _die(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.distributed_c10d._get_default_store().get("never")


def test_what_ends_a_process_is_raised_where_it_was_started() -> None:
    with pytest.raises(KeyError, match="broken") as caught:
        run_processes(2, _fail)
    assert "rank 1: Traceback (most recent call last):" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="rank 1 ended with exit code 3"):
        run_processes(2, _die)


def _leave_or_wait(rank: int) -> str:
    handle, ranks = _all()
    group = GlooGroup(handle, ranks, "pair")
    if rank == 1:
        dist.destroy_process_group()
        return ""
    message = ""
    try:
        group.receive(torch.zeros(1), 1, tag=3).wait()
    except CommunicationError as error:
        message = str(error)
    dist.destroy_process_group()
    return message


def test_a_peer_that_left_is_named_in_one_line() -> None:
    message = run_processes(2, _leave_or_wait)[0]
    start = "rank 0, group 'pair': waits for a message of rank 1, tag 3: the other process is gone"
    assert message.startswith(start)
    assert "\n" not in message


def _wait_for_nothing(rank: int) -> str:
    handle, ranks = _all()
    group = GlooGroup(handle, ranks, "pair")
    message = ""
    if rank == 0:
        try:
            group.receive(torch.zeros(1), 1).wait(timeout=0.2)
        except CommunicationError as error:
            message = str(error)
    else:
        dist.distributed_c10d._get_default_store().get("told")
    if rank == 0:
        dist.distributed_c10d._get_default_store().set("told", "yes")
    dist.destroy_process_group()
    return message


def test_a_message_that_does_not_come_in_time_is_an_error() -> None:
    message = run_processes(2, _wait_for_nothing)[0]
    assert "rank 0, group 'pair': waits for a message of rank 1, tag 0: nothing came" in message


def test_a_cause_is_one_sentence_without_the_transport_s_own_advice() -> None:
    told = RuntimeError(
        "[/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1234."
        " This is often an issue on the other side. GLHF!"
    )
    with pytest.raises(CommunicationError) as caught, explained("rank 0: send"):
        raise told
    assert "Connection closed by peer [127.0.0.1]:1234)" in str(caught.value)
    assert "GLHF" not in str(caught.value)
