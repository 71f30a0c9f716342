r"""One agreed sequence of units, and where this rank stands in it.

Ranks run their own Python, and one may skip what another does. An agreed sequence lets each of them
issue the same collectives nevertheless, without a word::

    agreed     a b c d
    this rank  a     d          reach("d") is ("b", "c"): take part in these first
    at the end                  rest() is what nobody here came to

A unit that does not come again in what is left of the sequence is *extra*: all ranks must be asked.
The sequence begins as the order of registration, each unit once. What a rank really did is its
record. A record that *follows* the sequence has the same units in the same order, some of them
perhaps never; any other must be compared with those of all ranks. If one sequence is followed by
all records, each rank leaving out other units perhaps, it is agreed from then on::

    rank 0     a b   d
    rank 1     a   c d          agreed: a b c d
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, pairwise

_Use = tuple[str, int]
"""A unit, and how often it was used before in the same record."""


class Order:
    """The sequence of one phase: the gathers of a forward pass, say."""

    def __init__(self, names: Sequence[str]) -> None:
        self.agreed = tuple(names)
        self.record: list[str] = []
        self.is_confirmed = False
        """Whether records of all ranks were compared before."""
        self._at = 0
        self._ahead: set[str] = set()

    def begin(self) -> None:
        """Begin the phase."""
        self.record, self._at, self._ahead = [], 0, set()

    def reach(self, name: str, *, ahead: bool = False) -> tuple[str, ...] | None:
        """What comes before ``name`` and was not done here; None if ``name`` is extra.

        ``ahead``: it is only gathered already; its use comes later.
        """
        if ahead:
            self._ahead.add(name)
        else:
            self.record.append(name)
            if name in self._ahead:
                self._ahead.discard(name)
                return ()
        try:
            place = self.agreed.index(name, self._at)
        except ValueError:
            return None
        passed = self.agreed[self._at : place]
        self._at = place + 1
        return tuple(passed)

    def coming(self) -> str | None:
        """What is due next."""
        return self.agreed[self._at] if self._at < len(self.agreed) else None

    def rest(self) -> tuple[str, ...]:
        """What is left when the phase ends."""
        left, self._at = self.agreed[self._at :], len(self.agreed)
        return tuple(left)

    def distance(self, name: str) -> int:
        """How many others come before ``name`` does again."""
        left = self.agreed[self._at :]
        return left.index(name) if name in left else len(left)

    @property
    def is_followed(self) -> bool:
        """Whether the record is the sequence, but for units that were never used."""
        return follows(self.record, self.agreed)

    def adopt(self, record: Sequence[str], kept: Iterable[str]) -> None:
        """Make ``record`` the sequence; units in ``kept`` that it lacks stay where they were."""
        self.agreed = merged(record, self.agreed, frozenset(kept))
        self.is_confirmed = True


def follows(record: Sequence[str], sequence: Sequence[str]) -> bool:
    """Whether ``record`` is ``sequence`` without the units that never occur in ``record``."""
    used = frozenset(record)
    return list(record) == [name for name in sequence if name in used]


def common(records: Iterable[Sequence[str]], former: Sequence[str] = ()) -> list[str] | None:
    """A sequence that every one of ``records`` follows, or None if there is none.

    Where the records leave it open, units stand as in ``former``, and then as in the records: the
    answer depends on nothing that ranks could see differently.
    """
    found = list(dict.fromkeys(map(tuple, records)))
    woven = _woven(found, former)
    return woven if all(follows(record, woven) for record in found) else None


def _woven(records: Sequence[Sequence[str]], former: Sequence[str]) -> list[str]:
    """All uses, each behind what came before it in any record; those in a circle are left out."""
    runs = [_uses(record) for record in records]
    order = list(dict.fromkeys([*_uses(former), *chain.from_iterable(runs)]))
    place = {use: k for k, use in enumerate(order)}
    owed = {use: 0 for run in runs for use in run}
    after: dict[_Use, list[_Use]] = {use: [] for use in owed}
    for before, behind in {pair for run in runs for pair in pairwise(run)}:
        after[before].append(behind)
        owed[behind] += 1
    ready = [place[use] for use, left in owed.items() if not left]
    heapify(ready)
    answer = []
    while ready:
        use = order[heappop(ready)]
        answer.append(use[0])
        for behind in after[use]:
            owed[behind] -= 1
            if not owed[behind]:
                heappush(ready, place[behind])
    return answer


def _uses(record: Sequence[str]) -> list[_Use]:
    seen: Counter[str] = Counter()
    answer = []
    for name in record:
        answer.append((name, seen[name]))
        seen[name] += 1
    return answer


def merged(record: Sequence[str], former: Sequence[str], kept: frozenset[str]) -> tuple[str, ...]:
    """``record``, each unit of ``former`` that is to be kept right behind its former neighbour."""
    answer = list(record)
    before: str | None = None
    for name in former:
        if name not in answer and name in kept:
            place = 0 if before is None else len(answer) - answer[::-1].index(before)
            answer.insert(place, name)
        if name in answer:
            before = name
    return tuple(answer)
