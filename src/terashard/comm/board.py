"""What ranks tell each other besides tensors: short texts, over the store of torch.distributed.

A rank that cannot go on as agreed must be able to ask the others even if they are about to do
something else. A collective would hang then; a text in the store waits for nobody::

    exchange("forward 3", "a b c")    post under forward 3/7/rank, read those of the others;
                                      7: how often this topic was talked about before

An exchange in which somebody stays silent ends after ``patience`` seconds; one that *heeds* ends as
soon as a rank refuses, so it may be patient with slow ones. The last two texts of every topic stay
readable, so that a silent rank can be named with what it said before; older ones are deleted.
"""

from collections import Counter
from collections.abc import Sequence
from time import monotonic, sleep

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.utils.weak import WeakIdKeyDictionary

from terashard.errors import RunError

PATIENCE = 5.0
"""Seconds after which a rank that says nothing is taken to be elsewhere."""

_MADE = WeakIdKeyDictionary()
"""By default process group: how many boards were made, by their ranks."""


class Board:
    """Where the ``ranks`` post texts, under a name that no other board has."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], *, name: str) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self._store = PrefixStore(f"terashard/{name}", store)
        self._said: Counter[str] = Counter()
        self._forgotten = 0
        """How many refusals belong to passes that were given up."""

    @classmethod
    def here(cls, ranks: Sequence[int]) -> "Board":
        """The next board of these ranks; all of them must make their boards in the same order."""
        world = dist.group.WORLD
        if world not in _MADE:
            _MADE[world] = Counter()
        made = _MADE[world]
        members = ",".join(map(str, ranks))
        made[members] += 1
        store = dist.distributed_c10d._get_default_store()
        return cls(store, dist.get_rank(), ranks, name=f"{members}/{made[members]}")

    def exchange(
        self, topic: str, said: str, *, patience: float = PATIENCE, heeds: bool = False
    ) -> dict[int, str]:
        """What every rank says about ``topic``; silent ranks are missing.

        ``heeds``: raise ``RunError`` if a rank refuses before all have spoken.
        """
        number = self._said[topic]
        self._said[topic] += 1
        self._store.set(f"{topic}/{number}/{self.rank}", said)
        deadline = monotonic() + patience
        heard = {}
        for rank in self.ranks:
            text = self._hear(f"{topic}/{number}/{rank}", deadline, heeds=heeds)
            if text is not None:
                heard[rank] = text
        if number >= 2 and len(heard) == len(self.ranks):
            self._store.delete_key(f"{topic}/{number - 2}/{self.rank}")
        return heard

    def agree(self, topic: str, said: str, *, patience: float = PATIENCE) -> None:
        """Go on if all say the same; else ``RunError`` everywhere, with what each said."""
        heard = self.exchange(topic, said, patience=patience)
        if any(heard.get(rank) != said for rank in self.ranks):
            self.refuse(self._told(topic, heard, patience))

    def refuse(self, why: str) -> None:
        """Raise ``RunError``, after leaving word for ranks whose wait will break off."""
        number = self._store.add("refusals", 1) - 1
        self._store.set(f"refused/{number}", f"rank {self.rank} stopped: {why}")
        raise RunError(why)

    def refused(self) -> str | None:
        """Why another rank stopped, if it left word."""
        return self._hear(self._refusal, monotonic() + 0.2)

    def forget(self) -> None:
        """Let refusals of the past be none of the next pass."""
        self._forgotten = self._store.add("refusals", 0)

    @property
    def _refusal(self) -> str:
        return f"refused/{self._forgotten}"

    def _told(self, topic: str, heard: dict[int, str], patience: float) -> str:
        by_text: dict[str, list[int]] = {}
        for rank in self.ranks:
            text = heard[rank] if rank in heard else self._silence(topic, rank, patience)
            by_text.setdefault(text, []).append(rank)
        return "; ".join(
            f"{'rank' if len(who) == 1 else 'ranks'} {', '.join(map(str, who))}: {text}"
            for text, who in by_text.items()
        )

    def _silence(self, topic: str, rank: int, patience: float) -> str:
        """What is known of a rank that did not speak in the last exchange about ``topic``."""
        before = self._hear(f"{topic}/{self._said[topic] - 2}/{rank}", monotonic())
        known = "" if before is None else f" (it said before: {before})"
        return f"said nothing for {patience:g} s, so it is doing something else{known}"

    def _hear(self, key: str, deadline: float, *, heeds: bool = False) -> str | None:
        """The text under ``key``, or None if it does not come.

        Asked for again and again: a FileStore waits in whole seconds, and a TCPStore that waits
        lets no other thread of this process near it.
        """
        pause = 0.0005
        try:
            while not self._store.check([key]):
                if heeds and self._store.check([self._refusal]):
                    raise RunError(self._store.get(self._refusal).decode())
                if monotonic() >= deadline:
                    return None
                sleep(pause)
                pause = min(2 * pause, 0.05)
            return self._store.get(key).decode()
        except RuntimeError:  # the store is gone, and who kept it
            return None
