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

With ``TERASHARD_DEBUG=1`` every collective is announced, and compared, before it is issued. A
greater number is how many seconds a rank may be later than another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from terashard.comm.board import PATIENCE, Board
from terashard.errors import CommunicationError, RunError
from terashard.shard.counts import Counts
from terashard.shard.differences import difference, other_values
from terashard.shard.module_unit import ModuleUnit
from terashard.shard.order import Order, common

_SILENCE = 8.0
"""Seconds after which a rank that announces nothing is named, with ``TERASHARD_DEBUG=1``."""

_FIRST_PASS = 60.0
"""Seconds after which a rank is taken to be elsewhere where all are bound to come."""

_SLACK = 2
"""Places by which a rank may be ahead of its own sums in a backward pass."""


class Turn:
    """The agreed sequences of one tree, and where this rank stands in them."""

    def __init__(
        self,
        units: Sequence[ModuleUnit],
        parents: Mapping[str, Sequence[str]],
        board: Board | None,
    ) -> None:
        self._board = board
        self._parents = parents
        self._outer = {name for above in parents.values() for name in above}
        self._units = {unit.name: unit for unit in units}
        names = tuple(self._units)
        self._orders = {"forward": Order(names), "backward": Order(names[::-1])}
        self._final: set[str] = set()
        self._summed: set[str] = set()
        self._sums: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        """A backward sequence, and the order of sums that follows from it."""
        self._silence = _patience()
        """Seconds for which an announced act is waited for, in debug mode."""
        self._announced = 0

    def begin(self, phase: str) -> None:
        """A phase begins."""
        self._orders[phase].begin()
        if phase == "backward":
            self._final, self._summed = set(), set()
            if not self._orders[phase].is_confirmed:
                last_first = dict.fromkeys(reversed(self._orders["forward"].agreed))
                self._orders[phase].agreed = self._parents_first(last_first)

    def reach(self, unit: ModuleUnit, phase: str, *, ahead: bool = False) -> list[ModuleUnit]:
        """The units in whose gathers this rank must take part before it comes to ``unit``."""
        order = self._orders.get(phase)
        if self._board is None or order is None or not _is_agreed(unit):
            return []
        passed = order.reach(unit.name, ahead=ahead)
        if passed is None and unit.is_there:
            return []
        if passed is None:
            use = order.record.count(unit.name)
            self._board.agree(
                f"extra {phase}",
                f"gathers unit {unit.name} for use {use} of a {phase} pass, where none was due",
            )
            return []
        return self._agreed(passed)

    def overdue(self, unit: ModuleUnit) -> list[ModuleUnit]:
        """The units whose sums other ranks may wait for by the time that this one is at ``unit``.

        A rank waits for a sum only when it has come two units further. One that has come so far
        issues the sum with what it has: a gradient that comes later is summed once more at the end.
        """
        if self._board is None or not _is_agreed(unit) or unit.name in self._outer:
            return []
        sums = self._sums_order()
        return self._take(sums[: max(sums.index(unit.name) - _SLACK + 1, 0)])

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
        is_first = not order.is_confirmed
        heard = self._board.exchange(
            f"record {phase}",
            json.dumps(order.record),
            patience=_FIRST_PASS if is_first else PATIENCE,
            heeds=is_first,
        )
        records = {rank: json.loads(text) for rank, text in heard.items()}
        complete = len(records) == len(self._board.ranks)
        agreed = common(records.values(), order.agreed) if complete else None
        if agreed is None:
            self._board.refuse(difference(phase, order, records, self._board))
        assert agreed is not None
        order.adopt(agreed, self._kept(phase))

    def coming(self, phase: str) -> ModuleUnit | None:
        """The unit that is due next, if that is agreed."""
        order = self._orders.get(phase)
        name = None if order is None or self._board is None else order.coming()
        return None if name is None or not _is_agreed(self._units[name]) else self._units[name]

    def distance(self, unit: ModuleUnit) -> int:
        """How many gathers come before that of ``unit`` in a forward pass."""
        return self._orders["forward"].distance(unit.name)

    def ready(self, unit: ModuleUnit) -> list[ModuleUnit]:
        """The units whose sums are to be issued now that the gradient of ``unit`` is final."""
        if self._board is None or not _is_agreed(unit):
            return [unit]
        self._final.add(unit.name)
        due: list[str] = []
        for name in self._sums_order():
            if self._owes(name) and name not in self._final:
                break
            due.append(name)
        return self._take(due)

    def owed(self) -> list[ModuleUnit]:
        """The units whose sums are still to be issued as the backward pass ends."""
        alone = [
            unit
            for unit in self._units.values()
            if (self._board is None or not _is_agreed(unit)) and unit.sums and unit.landing.waits
        ]
        return [*self._take(self._sums_order()), *alone]

    def reset(self) -> None:
        """Forget where this rank stands."""
        for order in self._orders.values():
            order.begin()
        self._final, self._summed = set(), set()
        if self._board is not None:
            self._board.forget()

    def announce(self, act: str, unit: ModuleUnit) -> None:
        """In debug mode, make sure that all ranks are about to do the same."""
        if self._silence is None or self._board is None:
            return
        self._announced += 1
        self._board.agree(
            "act", f"{act} unit {unit.name} (act {self._announced})", patience=self._silence
        )

    def agree_on_values(self) -> None:
        """Refuse ranks whose parameters differed when they were cut."""
        if self._board is None:
            return
        digests = {
            p.name: [p.digest, *unit.ranks]
            for unit in self._units.values()
            for p in unit.parameters
            if p.digest is not None
        }
        heard = self._board.exchange("values", json.dumps(digests))
        if len(set(heard.values())) > 1:
            digests_of = {rank: json.loads(text) for rank, text in heard.items()}
            different = other_values(digests_of, self._board.rank)
            if different is not None:
                self._board.refuse(different)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """If a wait breaks off because another rank refused to go on, say why it did."""
        try:
            yield
        except CommunicationError as error:
            why = None if self._board is None else self._board.refused()
            if why is None and self._silence is None:
                raise CommunicationError(
                    f"{error}; with TERASHARD_DEBUG=1 ranks compare what they do, and who does"
                    " something else is named"
                ) from error
            if why is None:
                raise
            raise RunError(why) from error

    def told_of(self, units: Sequence[ModuleUnit]) -> Counts:
        """How many ranks had a gradient of each parameter, and how many have late ones."""
        return Counts.of([unit for unit in units if _is_agreed(unit)])

    def _owes(self, name: str) -> bool:
        """Whether the sum of a unit is agreed on and was not issued."""
        unit = self._units[name]
        return name not in self._summed and _is_agreed(unit) and unit.sums

    def _take(self, names: Iterable[str]) -> list[ModuleUnit]:
        """Those of ``names`` whose sums are owed, each once; from now on they are issued."""
        if self._board is None:
            return []
        owed = [name for name in dict.fromkeys(names) if self._owes(name)]
        self._summed.update(owed)
        return [self._units[name] for name in owed]

    def _parents_first(self, names: Iterable[str]) -> tuple[str, ...]:
        """``names``, each behind the units that it stands inside: their outputs come first."""
        placed: dict[str, None] = {}
        for name in names:
            placed |= dict.fromkeys([*self._parents.get(name, ()), name])
        return tuple(placed)

    def _sums_order(self) -> tuple[str, ...]:
        """The backward sequence, each unit once and behind those inside it: final after them."""
        agreed = self._orders["backward"].agreed
        if self._sums is None or self._sums[0] != agreed:
            names = list(dict.fromkeys((*agreed, *self._units)))
            for outer in reversed(list(self._units)):
                inner = [name for name in names if outer in self._parents.get(name, ())]
                if inner:
                    names.remove(outer)
                    names.insert(max(map(names.index, inner)) + 1, outer)
            self._sums = (agreed, tuple(names))
        return self._sums[1]

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


def _patience() -> float | None:
    """What ``TERASHARD_DEBUG`` says: None for nothing or 0, a time for anything else."""
    said = os.environ.get("TERASHARD_DEBUG", "")
    if said in ("", "0"):
        return None
    return max(_SILENCE, float(said)) if said.isdecimal() else _SILENCE
