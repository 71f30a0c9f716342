"""When receives are posted: what the group of their direction says, never out of order."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from terashard.comm.mesh import Mesh
from terashard.comm.pieces import Done
from terashard.runtime.mail import Mail
from terashard.runtime.part import Part
from terashard.schedule.actions import Cell, Grid, Receive, Send
from terashard.schedule.lower import insert_transfers
from terashard.schedule.orders import fill_drain


class _Group:
    """Writes down what is asked of it, and has everything at once."""

    def __init__(self, receives_ahead: int, log: list[str]) -> None:
        self.receives_ahead, self._log = receives_ahead, log

    def receive(self, buffer: Tensor, peer: int) -> Done:
        self._log.append(f"post {int(buffer)}")
        return Done()

    def send(self, tensor: Tensor, peer: int) -> Done:
        return Done()


def _mail(ahead: int, log: list[str]) -> tuple[Mail, list[Receive]]:
    """The mail of the last of two ranks, to which slices 0 to 3 come down."""
    part = Part.of(insert_transfers(fill_drain(Grid.uniform(2, 1, 4))), 1)
    groups = SimpleNamespace(down=_Group(ahead, log), up=_Group(ahead, log))
    new_buffer: Callable[[Cell], Tensor] = lambda cell: torch.tensor(cell.slice)  # noqa: E731
    return Mail(part, cast(Mesh, cast(Any, groups)), new_buffer), list(part.receives["down"])


def _log(ahead: int) -> str:
    log: list[str] = []
    mail, receives = _mail(ahead, log)
    for receive in receives:
        log.append(f"turn {receive.cell.slice}")
        assert int(mail.receive(receive)) == receive.cell.slice
    return ", ".join(log)


def test_receives_are_posted_ahead_of_their_turn_where_that_costs_nothing() -> None:
    assert _log(2) == "post 0, post 1, turn 0, post 2, turn 1, post 3, turn 2, turn 3"


def test_no_receive_is_posted_before_its_turn_where_it_would_occupy_the_device() -> None:
    # On NCCL a posted receive is a kernel that spins: posted at the step's start, it held
    # multiprocessors through the whole warm-up.
    assert _log(0) == "turn 0, post 0, turn 1, post 1, turn 2, post 2, turn 3, post 3"


@pytest.mark.parametrize(("to", "way"), [(2, "down"), (0, "up")])
def test_both_sides_of_a_message_agree_about_its_way(to: int, way: str) -> None:
    send = Send(Cell(1, 2, 3), to)
    assert send.receive().send() == send
    assert send.way == send.receive().way == way
