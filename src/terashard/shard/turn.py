r"""In which order the ranks gather and sum the units of one tree.

Collectives of one group must be issued in the same order by all its ranks. So there is an agreed
sequence (``order.py``) for each *phase*: the gathers of a forward pass, those of a backward pass,
and the sums of a backward pass. A rank takes part in what it does not need itself, with zeros in
sums. What is sent besides tensors:

* after the first pass of a kind, every rank's record, over the board; then nothing, as long as all
  follow the sequence;
* a rank that comes to an extra unit asks the others first, and one whose record does not follow the
  sequence shows it when the phase ends. If all ranks do the same, that is agreed from then on. If
  not, each of them raises and names the unit and the ranks.

With ``TERASHARD_DEBUG=1`` every collective is announced, and compared, before it is issued.
"""

from __future__ import annotations

import os
from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from terashard.comm.board import Board
from terashard.comm.group import Group
from terashard.errors import CommunicationError, RunError
from terashard.shard.module_unit import ModuleUnit
from terashard.shard.order import Order, common
from terashard.shard.param import ShardedParameter

_SILENCE = 8.0
"""Seconds after which a rank that announces nothing is named, in debug mode."""


class Turn:
    """The agreed sequences of one tree, and where this rank stands in them."""

    def __init__(self, units: Sequence[ModuleUnit], board: Board | None) -> None:
        self._board = board
        self._units = {unit.name: unit for unit in units}
        names = tuple(self._units)
        self._orders = {
            "forward": Order(names),
            "backward": Order(names[::-1]),
            "sums": Order(names[::-1]),
        }
        self._final: list[str] = []
        self._summed: set[str] = set()
        self._debugs = os.environ.get("TERASHARD_DEBUG", "") not in ("", "0")
        self._announced = 0

    def begin(self, phase: str) -> None:
        """A phase begins."""
        there = [unit.name for unit in self._units.values() if unit.is_there]
        self._orders[phase].begin(there)
        if phase == "backward":
            self._final, self._summed = [], set()

    def reach(self, unit: ModuleUnit, phase: str) -> list[ModuleUnit]:
        """The units in whose gathers this rank must take part before that of ``unit``."""
        order = self._orders.get(phase)
        if self._board is None or order is None or not _is_agreed(unit):
            return []
        passed = order.reach(unit.name)
        if passed is None:
            use = order.record.count(unit.name)
            self._board.agree(
                f"extra {phase}",
                f"gathers unit {unit.name} for use {use} of a {phase} pass, where none was due",
            )
            return []
        return self._agreed(passed)

    def rest(self, phase: str) -> list[ModuleUnit]:
        """The units in whose gathers this rank must take part as the phase ends."""
        if self._board is None:
            return []
        order = self._orders[phase]
        left = self._agreed(order.rest())
        return [unit for unit in left if phase == "forward" or unit.rules.unshard_in_backward]

    def compare(self, phase: str) -> None:
        """The phase has ended: compare records if this rank has reason to."""
        order = self._orders[phase]
        if self._board is None or (order.is_confirmed and order.is_followed):
            return
        heard = self._board.exchange(f"record {phase}", " ".join(order.record))
        records = {rank: text.split() for rank, text in heard.items()}
        agreed = common(records.values()) if len(records) == len(self._board.ranks) else None
        if agreed is None:
            self._board.refuse(_difference(phase, order, records, self._board))
        assert agreed is not None
        order.adopt(agreed, self._kept(phase))

    def distance(self, unit: ModuleUnit) -> int:
        """How many gathers come before that of ``unit`` in a forward pass."""
        return self._orders["forward"].distance(unit.name)

    def ready(self, unit: ModuleUnit) -> list[ModuleUnit]:
        """The units whose sums are to be issued now that the gradient of ``unit`` is final."""
        if self._board is None or not _is_agreed(unit):
            return [unit]
        self._final.append(unit.name)
        return self._due(flush=False)

    def owed(self) -> list[ModuleUnit]:
        """The units whose sums are still to be issued as the backward pass ends."""
        if self._board is None:
            return [u for u in self._units.values() if _wants_sum(u) and u.landing.waits]
        lean = [
            u
            for u in self._units.values()
            if not _is_agreed(u) and _wants_sum(u) and u.landing.waits
        ]
        return self._due(flush=True) + lean

    def settle_sums(self) -> None:
        """After the first backward pass, sums come in the order in which gradients became final."""
        order = self._orders["sums"]
        if self._board is None or order.is_confirmed:
            return
        heard = self._board.exchange("record sums", " ".join(self._final))
        final = common([text.split() for text in heard.values()])
        if final is None or len(heard) < len(self._board.ranks):
            final = order.agreed
        order.agreed = (*final, *(name for name in order.agreed if name not in final))
        order.is_confirmed = True

    def reset(self) -> None:
        """Forget where this rank stands."""
        for order in self._orders.values():
            order.begin()
        self._final, self._summed = [], set()

    def announce(self, act: str, unit: ModuleUnit) -> None:
        """In debug mode, make sure that all ranks are about to do the same."""
        if not self._debugs or self._board is None:
            return
        self._announced += 1
        self._board.agree(
            "act", f"{act} unit {unit.name} (act {self._announced})", patience=_SILENCE
        )

    def agree_on_values(self) -> None:
        """Refuse ranks whose parameters differed when they were cut."""
        if self._board is None:
            return
        digests = {
            p.name: p.digest
            for unit in self._units.values()
            for p in unit.parameters
            if p.digest is not None
        }
        heard = self._board.exchange("values", str(sorted(digests.items())))
        if len(set(heard.values())) > 1:
            self._board.refuse(_other_values(digests, heard, self._board.rank))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """If a wait breaks off because another rank refused to go on, say why it did."""
        try:
            yield
        except CommunicationError as error:
            why = None if self._board is None else self._board.refused()
            if why is None:
                raise
            raise RunError(why) from error

    def used_anywhere(self, units: Sequence[ModuleUnit]) -> Callable[[ShardedParameter], bool]:
        """Whether any rank had a gradient of a parameter of ``units``, once their sums are done.

        The counts travel in one sum per group; they are read only for parameters for which this
        rank had none, so a GPU is not waited for as long as all is used.
        """
        counts: dict[ShardedParameter, torch.Tensor] = {}
        for groups, members in _by_groups(units).items():
            flags = [(p, here) for unit in members for p, here in unit.landing.present.items()]
            if not flags:
                continue
            device = members[0].axes.device
            vector = torch.tensor([float(here) for _, here in flags], device=device)
            for group in groups:
                if group.size > 1:
                    group.sum(vector).wait()
            counts |= {p: vector[index] for index, (p, _) in enumerate(flags)}
        here = {p for unit in units for p, is_here in unit.landing.present.items() if is_here}
        return lambda p: p in here or (p in counts and bool(counts[p] > 0))

    def _due(self, *, flush: bool) -> list[ModuleUnit]:
        """What may be summed now, in order: up to the first that is not final here, or all."""
        due = []
        for name in self._orders["sums"].agreed:
            unit = self._units[name]
            if name in self._summed or not (_is_agreed(unit) and _wants_sum(unit)):
                continue
            if name not in self._final and not flush:
                break
            self._summed.add(name)
            due.append(unit)
        return due

    def _agreed(self, names: Sequence[str]) -> list[ModuleUnit]:
        return [self._units[name] for name in names if _is_agreed(self._units[name])]

    def _kept(self, phase: str) -> list[str]:
        """Units that stay in a sequence though nobody used them.

        One that is frozen and is not gathered in a backward pass will not be in the next.
        """
        units = self._units.values()
        return [u.name for u in units if phase == "forward" or u.is_trainable]


def _is_agreed(unit: ModuleUnit) -> bool:
    """Whether ranks may differ in what they use of ``unit``, unless the caller promised not to."""
    return unit.rules.sums_unused is not False and unit.axes.shards * unit.axes.replicas > 1


def _wants_sum(unit: ModuleUnit) -> bool:
    return unit.rules.sums and unit.is_trainable


def _by_groups(units: Sequence[ModuleUnit]) -> dict[tuple[Group, Group], list[ModuleUnit]]:
    found: dict[tuple[Group, Group], list[ModuleUnit]] = {}
    for unit in units:
        if unit.axes.shards * unit.axes.replicas > 1:
            found.setdefault((unit.axes.shard_reduce, unit.axes.replica), []).append(unit)
    return found


def _difference(phase: str, order: Order, records: dict[int, list[str]], board: Board) -> str:
    silent = [rank for rank in board.ranks if rank not in records]
    if silent:
        return (
            f"rank {board.rank} used units in another order or number in its {phase} pass than was"
            f" agreed ({_first_difference(order.record, order.agreed)}), and ranks"
            f" {', '.join(map(str, silent))} did not; all ranks must use the same units equally"
            " often and in the same order, or not at all"
        )
    here = records[board.rank]
    others = [rank for rank in records if rank != board.rank]
    unlike = [rank for rank in others if common([records[rank], here]) is None]
    other = (unlike or others)[0]
    return (
        f"ranks {board.rank} and {other} used units in another order or number in a {phase} pass:"
        f" {_first_difference(here, records[other])}; all ranks must use the same units equally"
        " often and in the same order, or not at all"
    )


def _first_difference(here: Sequence[str], there: Sequence[str]) -> str:
    for name in dict.fromkeys([*here, *there]):
        mine, theirs = here.count(name), there.count(name)
        if mine and theirs and mine != theirs:
            return f"unit {name} {mine} times here, {theirs} times there"
    both = [(a, b) for a, b in zip(here, there, strict=False) if a != b]
    return f"unit {both[0][0]} here where unit {both[0][1]} came there" if both else "at the end"


def _other_values(digests: dict[str, int | None], heard: dict[int, str], rank: int) -> str:
    for other, text in heard.items():
        theirs = dict(literal_eval(text))
        for name, digest in digests.items():
            if theirs.get(name) != digest:
                return (
                    f"ranks {rank} and {other} held different values of parameter {name} when it"
                    " was sharded; build the module with the same seed on all ranks, load the same"
                    " file, or call synchronise(module) before fully_shard"
                )
    return "ranks held different parameters when they were sharded"
