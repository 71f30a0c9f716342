"""One small message between every two ranks that will exchange data, before the first step.

A wrong network interface, a firewall or a process that died at its start shows here, in seconds and
with both ranks named, and not as a silent wait in step 1.

Every pair of ranks has one place in an order that all ranks share, (lower rank, higher rank); in a
pair the lower rank sends first and the higher receives first. So the first pair that is not done is
at the head of both its members' lists: even where a message blocks what is issued after it, no
cycle of waits can form. Nothing is waited for before everything is issued.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from terashard.comm.group import Group, Work
from terashard.comm.mesh import Mesh
from terashard.errors import CommunicationError

PING_TAG = 2**30 - 1
"""No message of a step has this tag."""


@runtime_checkable
class TimedWork(Protocol):
    """A ``Work`` that can be waited for with a limit of its own, in seconds."""

    def wait(self, timeout: float | None = None) -> None:
        """See ``Work.wait``."""


@dataclass(frozen=True, slots=True)
class Link:
    """A group in which this rank exchanges data with the member at position ``peer``."""

    name: str
    group: Group
    peer: int
    sends: bool = True
    receives: bool = True

    @property
    def rank(self) -> int:
        """The peer's global rank."""
        return self.group.ranks[self.peer]


def ping(mesh: Mesh, timeout: float = 30.0) -> None:
    """Exchange a message over every link of this rank, or raise ``CommunicationError``.

    ``timeout`` is in seconds, for all links together. Every rank of the mesh must call it.
    """
    deadline = time.monotonic() + timeout
    waits: list[tuple[Link, Work, Tensor | None]] = []
    for link in sorted(links(mesh), key=lambda link: (*_pair(mesh, link), link.name)):
        try:
            waits += _issue(mesh, link)
        except CommunicationError as error:
            raise _unreachable(mesh, link, timeout, error) from error
    waits.sort(key=lambda wait: wait[2] is None)  # receives first: they say who is missing
    for link, work, buffer in waits:
        try:
            _wait(work, max(deadline - time.monotonic(), 0.001))
        except CommunicationError as error:
            raise _unreachable(mesh, link, timeout, error) from error
        if buffer is not None and int(buffer.item()) != link.rank:
            raise CommunicationError(
                f"{mesh} got the message of rank {int(buffer.item())} where it expects that of"
                f" {mesh.name_of(link.rank)}, in group {link.name!r}; the processes disagree about"
                " their ranks: start them all with the same plan"
            )


def links(mesh: Mesh) -> Iterator[Link]:
    """Everything over which this rank will exchange data."""
    stage, last = mesh.coordinates.stage, mesh.stages - 1
    if stage < last:
        yield Link("down", mesh.down, stage + 1, receives=False)
        yield Link("up", mesh.up, stage + 1, sends=False)
    if stage > 0:
        yield Link("down", mesh.down, stage - 1, sends=False)
        yield Link("up", mesh.up, stage - 1, receives=False)
    for name in ("shard_gather", "shard_reduce", "replica", "tie"):
        group: Group | None = getattr(mesh, name)
        if group is not None:
            for peer in range(group.size):
                if peer != group.rank:
                    yield Link(name, group, peer)


def _pair(mesh: Mesh, link: Link) -> tuple[int, int]:
    return min(mesh.rank, link.rank), max(mesh.rank, link.rank)


def _issue(mesh: Mesh, link: Link) -> list[tuple[Link, Work, Tensor | None]]:
    issued: list[tuple[Link, Work, Tensor | None]] = []
    first = mesh.rank < link.rank
    for sending in (first, not first):
        value = torch.tensor([mesh.rank if sending else -1], device=mesh.device)
        if sending and link.sends:
            issued.append((link, link.group.send(value, link.peer, PING_TAG), None))
        elif not sending and link.receives:
            issued.append((link, link.group.receive(value, link.peer, PING_TAG), value))
    return issued


def _wait(work: Work, timeout: float) -> None:
    if isinstance(work, TimedWork):
        work.wait(timeout)
    else:
        work.wait()


def _unreachable(
    mesh: Mesh, link: Link, timeout: float, error: CommunicationError
) -> CommunicationError:
    return CommunicationError(
        f"{mesh} cannot reach {mesh.name_of(link.rank)} within {timeout:g} s: is its process"
        f" running, and can the two machines connect (firewall, GLOO_SOCKET_IFNAME,"
        f" NCCL_SOCKET_IFNAME)? [{error}]"
    )
