"""Sentences that say how ranks differ: in what they used, or in the values that they began with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from terashard.comm.board import Board
from terashard.shard.order import Order, common


def difference(phase: str, order: Order, records: dict[int, list[str]], board: Board) -> str:
    """How this rank's record of a phase differs from those of others, or from what was agreed."""
    silent = [rank for rank in board.ranks if rank not in records]
    if silent:
        who = f"{'rank' if len(silent) == 1 else 'ranks'} {', '.join(map(str, silent))}"
        return (
            f"rank {board.rank} used units in another order or number in its {phase} pass than was"
            f" agreed ({_first_difference(order.record, order.agreed)}), and {who} did not; all"
            " ranks must use the same units equally often and in the same order, or not at all"
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


def other_values(heard: Mapping[int, Mapping[str, Sequence[int]]], here: int) -> str | None:
    """Which ranks held different values of what they share out, if any did; this one first.

    ``heard``: by rank and parameter, a checksum, and the ranks that share the parameter out.
    """
    for rank in sorted(heard, key=lambda rank: rank != here):
        digests = heard[rank]
        for name, (digest, *sharing) in digests.items():
            for other in sharing:
                theirs = heard.get(other, {}).get(name, (digest,))[0]
                if theirs != digest:
                    return (
                        f"ranks {rank} and {other} held different values of parameter {name} when"
                        " it was sharded; build the module with the same seed on all ranks, load"
                        " the same file, or call synchronise(module) before fully_shard"
                    )
    return None
