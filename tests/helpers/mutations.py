"""Small faults put into a right schedule, one at a time, to see whether they are noticed."""

from dataclasses import replace
from random import Random
from typing import Literal, NamedTuple, get_args

from terashard.schedule.actions import Action, Receive, Send
from terashard.schedule.schedule import Schedule

Kind = Literal["drop", "duplicate", "wrong_peer", "swap"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Mutation(NamedTuple):
    """A schedule with one fault, and the fault in words."""

    kind: Kind
    description: str
    schedule: Schedule


def mutate(schedule: Schedule, random: Random, kind: Kind | None = None) -> Mutation:
    """Drop or repeat an action, send it to another stage, or swap two on one rank.

    A swap may leave the schedule right; the other three never do. The same ``random`` state gives
    the same fault. A schedule without transfers has no wrong peers.
    """
    programs = list(schedule)
    transfers = [
        (rank, position)
        for rank, actions in enumerate(programs)
        for position, action in enumerate(actions)
        if isinstance(action, Send | Receive)
    ]
    kind = kind or random.choice([k for k in KINDS if transfers or k != "wrong_peer"])
    if kind == "wrong_peer":
        rank, position = random.choice(transfers)
    else:
        rank = random.choice([r for r, actions in enumerate(programs) if len(actions) > 1])
        position = random.randrange(len(programs[rank]))
    where = f"{kind} rank {rank}, position {position}: {programs[rank][position]}"
    change = {"drop": _drop, "duplicate": _duplicate, "wrong_peer": _misdirect, "swap": _swap}[kind]
    what = change(programs[rank], position, random, schedule.grid.num_stages)
    return Mutation(kind, f"{where}{what}", schedule.with_actions(programs))


def _drop(program: list[Action], position: int, random: Random, stages: int) -> str:
    del program[position]
    return ""


def _duplicate(program: list[Action], position: int, random: Random, stages: int) -> str:
    to = random.randint(0, len(program))
    program.insert(to, program[position])
    return f" again before position {to}"


def _misdirect(program: list[Action], position: int, random: Random, stages: int) -> str:
    action = program[position]
    assert isinstance(action, Send | Receive)
    right = action.to if isinstance(action, Send) else action.source
    peer = random.choice([stage for stage in range(-1, stages + 1) if stage != right])
    program[position] = (
        replace(action, to=peer) if isinstance(action, Send) else replace(action, source=peer)
    )
    return f" becomes {program[position]}"


def _swap(program: list[Action], position: int, random: Random, stages: int) -> str:
    """Half of all swaps are of neighbours: far ones are hardly ever right."""
    near = [p for p in (position - 1, position + 1) if 0 <= p < len(program)]
    far = [p for p in range(len(program)) if p != position]
    other = random.choice(near if random.random() < 0.5 else far)
    program[position], program[other] = program[other], program[position]
    return f" with position {other}: {program[position]}"
