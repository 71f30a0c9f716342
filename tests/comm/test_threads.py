import threading
import time

import pytest
import torch

from terashard.comm.threads import ThreadWorld, run_threads
from terashard.errors import CommunicationError
from tests.comm.claims import exchange_everything


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_exchange_gives_what_its_definition_says(size: int) -> None:
    def run(world: ThreadWorld, rank: int) -> None:
        exchange_everything(world.group(rank, range(size), "all"))

    run_threads(size, run)


def test_a_send_is_a_copy_and_does_not_wait_for_its_receiver() -> None:
    world = ThreadWorld(2)
    a, b = (world.group(rank, (0, 1), "pair") for rank in (0, 1))
    message, got = torch.ones(3), torch.zeros(3)
    a.send(message, 1).wait()
    message.fill_(7.0)
    b.receive(got, 0).wait()
    assert torch.equal(got, torch.ones(3))


def test_messages_keep_their_order_per_tag_however_they_are_waited_for() -> None:
    world = ThreadWorld(2)
    a, b = (world.group(rank, (0, 1), "pair") for rank in (0, 1))
    for tag, value in [(0, 1.0), (9, 2.0), (0, 3.0)]:
        a.send(torch.tensor([value]), 1, tag)
    buffers = [torch.zeros(1) for _ in range(3)]
    works = [b.receive(buffer, 0, tag) for buffer, tag in zip(buffers, (0, 0, 9), strict=True)]
    for work in reversed(works):
        work.wait()
    assert [buffer.item() for buffer in buffers] == [1.0, 3.0, 2.0]


def test_groups_of_the_same_ranks_and_other_names_do_not_mix() -> None:
    world = ThreadWorld(2, timeout=0.05)
    down, up = world.group(0, (0, 1), "down"), world.group(1, (0, 1), "up")
    down.send(torch.ones(1), 1)
    with pytest.raises(CommunicationError, match="rank 1, group 'up': waits for message 0 of rank"):
        up.receive(torch.zeros(1), 0).wait()


def test_a_received_tensor_is_no_in_place_change_for_autograd() -> None:
    world = ThreadWorld(2)
    weight = torch.ones(2, requires_grad=True)
    y = (weight * weight).sum()
    world.group(0, (0, 1), "pair").send(torch.full((2,), 3.0), 1).wait()
    world.group(1, (0, 1), "pair").receive(weight, 0).wait()
    y.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((2,), 6.0))


def test_a_message_of_another_shape_or_type_is_refused() -> None:
    world = ThreadWorld(2)
    a, b = (world.group(rank, (0, 1), "pair") for rank in (0, 1))
    a.send(torch.ones(3), 1, tag=4)
    with pytest.raises(CommunicationError, match=r"is float32 \(3,\), but the buffer is float64"):
        b.receive(torch.zeros(3, dtype=torch.float64), 0, tag=4).wait()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("sum", "barrier", r"rank \d calls .*; all members must issue the same"),
        ("sum", "longer", r"sum\(float32 \(\d,\)\)"),
        ("rows", "sum", "gather_rows"),
    ],
)
def test_different_collectives_are_refused_naming_both(
    first: str, second: str, message: str
) -> None:
    def run(world: ThreadWorld, rank: int) -> None:
        group = world.group(rank, (0, 1), "pair")
        calls = {
            "sum": lambda: group.sum(torch.ones(2)).wait(),
            "longer": lambda: group.sum(torch.ones(3)).wait(),
            "rows": lambda: group.gather_rows([torch.ones(2)]).wait(),
            "barrier": group.barrier,
        }
        calls[first if rank == 0 else second]()

    with pytest.raises(CommunicationError, match=message):
        run_threads(2, run)


def test_a_failing_rank_wakes_the_others_at_once_and_its_exception_is_raised() -> None:
    heard: list[str] = []

    def run(world: ThreadWorld, rank: int) -> None:
        if rank == 1:
            time.sleep(0.02)
            raise KeyError("broken")
        group = world.group(rank, range(4), "all")
        try:
            if rank == 0:
                group.receive(torch.zeros(1), 1).wait()
            group.barrier()
        except CommunicationError as error:
            heard.append(str(error))
            raise

    start = time.monotonic()
    with pytest.raises(KeyError, match="broken"):
        run_threads(4, run)
    assert time.monotonic() - start < 5
    assert len(heard) == 3
    assert all("another rank failed with KeyError" in text for text in heard)


def test_a_peer_that_never_comes_is_an_error_after_the_time_out() -> None:
    world = ThreadWorld(3, timeout=0.05)
    group = world.group(1, range(3), "all")
    with pytest.raises(CommunicationError, match=r"sum\(float32 \(1,\)\), for ranks \[0, 2\]"):
        group.sum(torch.zeros(1)).wait()


def test_wrong_peers_groups_and_strides_are_refused() -> None:
    world = ThreadWorld(3)
    group = world.group(2, (0, 2), "ends")
    with pytest.raises(CommunicationError, match="position 2 is no peer of position 1"):
        group.send(torch.ones(1), 2)
    with pytest.raises(CommunicationError, match="position 1 is no peer of position 1"):
        group.receive(torch.ones(1), 1)
    with pytest.raises(CommunicationError, match="only contiguous tensors travel"):
        group.send(torch.ones(2, 3).t(), 0)
    with pytest.raises(CommunicationError, match="only contiguous tensors travel"):
        group.sum_scatter([torch.ones(4, 2).t()], [torch.ones(1, 4)])
    with pytest.raises(CommunicationError, match=r"of a \(3, 2\) tensor, member 1 of 2 holds"):
        group.sum_scatter([torch.ones(3, 2)], [torch.ones(2, 2)])
    with pytest.raises(CommunicationError, match="rank 1 asks for group 'ends'"):
        world.group(1, (0, 2), "ends")


def test_results_come_by_rank_and_no_thread_is_left() -> None:
    before = threading.active_count()
    assert run_threads(3, lambda world, rank: rank * 10) == [0, 10, 20]
    assert threading.active_count() == before
