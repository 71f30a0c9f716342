"""Which units are held when: the fewest gathers that a budget allows, against brute force."""

from itertools import product
from random import Random

import pytest

from terashard.errors import PlanError
from terashard.plan.plan import Plan
from terashard.schedule.actions import Gather, Reduce, Release
from terashard.schedule.schedule import Unit


def plan(units: int, budget: int | None, *, slices: int = 1, micros: int = 1, **rest: int) -> Plan:
    del units
    return Plan.uniform(
        sequences=micros, tokens=16, slices=slices, micro_batches=micros, residency=budget, **rest
    )


def gathers(count: int, budget: int, slices: int, sizes: dict[str, int] | None = None) -> int:
    """Gathers in a step of one stage of ``count`` units without a head."""
    units = [[Unit(f"u{i}") for i in range(count)]]
    each = sizes or {f"u{i}": 1 for i in range(count)}
    made = plan(count, budget, slices=slices, order="fill_drain", shards=2)  # type: ignore[arg-type]
    schedule = made.schedule(units, each)
    actions = list(schedule.actions(0))
    assert sum(isinstance(a, Release) for a in actions) == sum(
        isinstance(a, Gather) for a in actions
    )
    assert sum(isinstance(a, Reduce) for a in actions) == count
    assert most_held(schedule, each) <= budget
    return sum(isinstance(a, Gather) for a in actions)


def most_held(schedule: object, sizes: dict[str, int]) -> int:
    held, most = 0, 0
    for action in schedule.actions(0):  # type: ignore[attr-defined]
        if isinstance(action, Gather | Release):
            size = sizes[schedule.units[action.unit.stage][action.unit.index].name]  # type: ignore[attr-defined]
            held += size if isinstance(action, Gather) else -size
            most = max(most, held)
    assert held == 0
    return most


@pytest.mark.parametrize(("budget", "each"), [(1, 31.9), (4, 18.5), (7, 5.4), (8, 1.0)])
def test_gathers_per_unit_fall_as_the_budget_grows(budget: int, each: float) -> None:
    """Eight equal units, sixteen slices: the numbers of an independent count."""
    assert gathers(8, budget, 16) / 8 == pytest.approx(each, abs=0.06)


@pytest.mark.parametrize("seed", range(40))
def test_equal_units_are_gathered_as_seldom_as_brute_force_finds(seed: int) -> None:
    random = Random(seed)
    count, slices = random.randint(2, 5), random.choice([1, 2, 4])
    budget = random.randint(1, count)
    assert gathers(count, budget, slices) == fewest(count, budget, slices, [1] * count)


@pytest.mark.parametrize("seed", range(20))
def test_unequal_units_are_near_what_brute_force_finds(seed: int) -> None:
    random = Random(100 + seed)
    count, slices = random.randint(3, 5), random.choice([1, 2])
    sizes = [random.randint(1, 3) for _ in range(count)]
    budget = random.randint(max(sizes), sum(sizes))
    named = {f"u{i}": size for i, size in enumerate(sizes)}
    best = fewest(count, budget, slices, sizes)
    assert best <= gathers(count, budget, slices, named) <= best * 1.25 + 1


def fewest(count: int, budget: int, slices: int, sizes: list[int]) -> int:
    """The least number of gathers, over all choices of what to let go of."""
    sweep = [*range(count)] * slices + [*reversed(range(count))] * slices
    states = {frozenset[int](): 0}
    for unit in sweep:
        following: dict[frozenset[int], int] = {}
        for held, cost in states.items():
            if unit in held:
                options = [(held, cost)]
            else:
                options = [
                    (frozenset(kept) | {unit}, cost + 1)
                    for kept in subsets(held)
                    if sum(sizes[k] for k in kept) + sizes[unit] <= budget
                ]
            for state, total in options:
                following[state] = min(total, following.get(state, total))
        states = following
    return min(states.values())


def subsets(held: frozenset[int]) -> list[set[int]]:
    members = sorted(held)
    return [
        {m for m, keep in zip(members, kept, strict=True) if keep}
        for kept in product([False, True], repeat=len(members))
    ]


def test_what_ends_the_forward_pass_is_there_when_the_backward_pass_begins() -> None:
    units = [[Unit(f"u{i}") for i in range(4)]]
    made = plan(4, 2, order="fill_drain", shards=2)  # type: ignore[arg-type]
    text = " ".join(str(a) for a in made.schedule(units, {f"u{i}": 1 for i in range(4)}).actions(0))
    assert text == (
        "G0:0 G0:1 F0.0.0 X0:0 G0:2 F0.0.0/1 X0:1 G0:3 F0.0.0/2 F0.0.0/3"
        " B0.0.0/3 X0:3 G0:1 A0:3@shard B0.0.0/2 X0:2 G0:0 A0:2@shard B0.0.0/1"
        " X0:1 A0:1@shard B0.0.0 X0:0 A0:0@shard"
    )


def test_a_budget_below_what_is_used_at_once_says_how_much_it_takes() -> None:
    units = [[Unit("embed"), Unit("layer"), Unit("head", head=True, borrows=("embed",))]]
    sizes = {"embed": 3000, "layer": 100, "head": 50}
    with pytest.raises(PlanError, match=r"cannot hold embed and head, which take 2\.98 KiB"):
        plan(3, 3020, shards=2).schedule(units, sizes)
    plan(3, 3050, shards=2).schedule(units, sizes)
