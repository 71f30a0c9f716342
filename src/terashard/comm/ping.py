"""One small exchange in every group of a mesh, before the first step, in the way of the steps.

A wrong network interface, a firewall or a process that died at its start shows here, in seconds and
with the ranks named, and not as a silent wait in step 1. It also makes NCCL build the communicators
that the steps use: messages go where steps send messages (``down``, ``up``), and every other group
takes one sum, as its collectives will.

No cycle of waits can form, even where an operation blocks what is issued after it. All ranks issue
their messages first, in one order of pairs, (lower rank, higher rank); in a pair the lower rank
sends first and the higher receives first. Then come the sums, in one order of groups. So the first
operation that is not done is at the head of all its members' lists. Nothing is waited for before
everything is issued.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from terashard.comm.group import Group, Work
from terashard.comm.layout import GROUPS
from terashard.comm.mesh import Mesh
from terashard.errors import CommunicationError

PING_TAG = 2**30 - 1
"""No message of a step has this tag."""


@dataclass(frozen=True, slots=True)
class Link:
    """A group in which this rank exchanges messages with the member at position ``peer``."""

    name: str
    group: Group
    peer: int
    sends: bool = True
    receives: bool = True

    @property
    def rank(self) -> int:
        """The peer's global rank."""
        return self.group.ranks[self.peer]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchange:
    """Something issued in the group ``name`` with the global ``ranks``, not yet known to end."""

    name: str
    ranks: Sequence[int]
    work: Work
    value: Tensor | None = None
    """What arrives; None for a send."""
    wanted: int = 0
    """What ``value`` should be then."""


def ping(mesh: Mesh, timeout: float = 30.0) -> None:
    """Try every group of this rank, or raise ``CommunicationError``.

    ``timeout`` is in seconds, for all groups together. Every rank of the mesh must call it.
    """
    deadline = time.monotonic() + timeout
    issued: list[_Exchange] = []
    for link in sorted(links(mesh), key=lambda link: (*_pair(mesh, link), link.name)):
        with_peer = (mesh.rank, link.rank)
        try:
            issued += _issue(mesh, link)
        except CommunicationError as error:
            raise _unreachable(mesh, link.name, with_peer, timeout, error) from error
    for name, group in summing(mesh):
        try:
            issued.append(_sum(mesh, name, group))
        except CommunicationError as error:
            raise _unreachable(mesh, name, group.ranks, timeout, error) from error
    # The smallest circle first, and receives before sends: they say best who is missing.
    for each in sorted(issued, key=lambda e: (len(e.ranks), e.value is None)):
        try:
            each.work.wait(max(deadline - time.monotonic(), 0.001))
        except CommunicationError as error:
            raise _unreachable(mesh, each.name, each.ranks, timeout, error) from error
        _require(mesh, each)


def links(mesh: Mesh) -> Iterator[Link]:
    """Everything over which this rank will exchange messages."""
    stage, last = mesh.coordinates.stage, mesh.stages - 1
    if stage < last:
        yield Link("down", mesh.down, stage + 1, receives=False)
        yield Link("up", mesh.up, stage + 1, sends=False)
    if stage > 0:
        yield Link("down", mesh.down, stage - 1, sends=False)
        yield Link("up", mesh.up, stage - 1, receives=False)


def summing(mesh: Mesh) -> Iterator[tuple[str, Group]]:
    """The groups in which this rank will take part in collectives, in the order of all ranks."""
    for name in GROUPS:
        group: Group | None = getattr(mesh, name)
        if name not in ("down", "up") and group is not None and group.size > 1:
            yield name, group


def _pair(mesh: Mesh, link: Link) -> tuple[int, int]:
    return min(mesh.rank, link.rank), max(mesh.rank, link.rank)


def _issue(mesh: Mesh, link: Link) -> Iterator[_Exchange]:
    ranks, first = (mesh.rank, link.rank), mesh.rank < link.rank
    for sending in (first, not first):
        value = torch.tensor([mesh.rank if sending else -1], device=mesh.device)
        if sending and link.sends:
            work = link.group.send(value, link.peer, PING_TAG)
            yield _Exchange(name=link.name, ranks=ranks, work=work)
        elif not sending and link.receives:
            work = link.group.receive(value, link.peer, PING_TAG)
            yield _Exchange(name=link.name, ranks=ranks, work=work, value=value, wanted=link.rank)


def _sum(mesh: Mesh, name: str, group: Group) -> _Exchange:
    """Every member gives its rank, so that the sum is known."""
    value = torch.tensor([mesh.rank], device=mesh.device)
    work, wanted = group.sum(value), sum(group.ranks)
    return _Exchange(name=name, ranks=group.ranks, work=work, value=value, wanted=wanted)


def _require(mesh: Mesh, each: _Exchange) -> None:
    if each.value is None or (found := int(each.value.item())) == each.wanted:
        return
    raise CommunicationError(
        f"{mesh} got {found} from {_names(mesh, each.ranks)} in group {each.name!r}, where it"
        f" expects {each.wanted}: the processes disagree about their ranks; start them all with the"
        " same plan"
    )


def _unreachable(
    mesh: Mesh, name: str, ranks: Sequence[int], timeout: float, error: CommunicationError
) -> CommunicationError:
    return CommunicationError(
        f"{mesh} cannot reach {_names(mesh, ranks)} in group {name!r} within {timeout:g} s: is each"
        f" process running, and can the machines connect (firewall, GLOO_SOCKET_IFNAME,"
        f" NCCL_SOCKET_IFNAME)? [{error}]"
    )


def _names(mesh: Mesh, ranks: Sequence[int]) -> str:
    """The other rank with its coordinates, or all others by number."""
    others = [rank for rank in ranks if rank != mesh.rank]
    if len(others) == 1:
        return mesh.name_of(others[0])
    return f"all of ranks {', '.join(map(str, others))}"
