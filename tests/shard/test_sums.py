"""Sums on their way: few at a time, in one order, nothing waited for inside the list."""

import pytest

from terashard.comm.threads import ThreadWorld, run_threads
from terashard.schedule.actions import Over
from terashard.shard.sums import IN_FLIGHT, Sums
from tests.shard.toys import Rank, assert_same, batch, loss_of, reference


class _Unit:
    """Notes what it is told; ``alone``: axes over which nothing has to travel."""

    def __init__(self, name: str, log: list[str], alone: tuple[Over, ...] = ()) -> None:
        self.name, self.log, self.alone, self.is_reducing = name, log, alone, False

    def reduce(self, over: Over) -> None:
        self.log.append(f"{self.name}@{over}")
        self.is_reducing = over not in self.alone

    def wait_issued(self) -> None:
        self.log.append(f"{self.name} there")
        self.is_reducing = False


def _log(names: str, *, alone: tuple[Over, ...] = (), tie: str = "") -> list[str]:
    log: list[str] = []
    sums, units = Sums(), {name: _Unit(name, log, alone) for name in names}
    for unit in units.values():
        sums.reduce(unit, "shard")
        sums.reduce(unit, "replica")
    if tie:
        sums.reduce(units[tie], "tie")
    log.append("end")
    for unit in sorted(units.values(), key=lambda unit: unit.name, reverse=True):
        sums.settle(unit)
    assert not any(unit.is_reducing for unit in units.values() if unit.name != tie)
    return log


def test_a_sum_is_finished_when_the_one_after_next_is_issued_and_no_sooner() -> None:
    """Regression: all sums over shards lived until the end of the step, with what was received;
    and each sum over replicas waited inside the list for the one over shards."""
    assert _log("abcde") == [
        *("a@shard", "b@shard"),
        *("a there", "a@replica", "c@shard"),
        *("b there", "b@replica", "d@shard"),
        *("c there", "a there", "c@replica", "e@shard"),
        "end",
        *("d there", "b there", "d@replica"),
        *("e there", "c there", "e@replica", "d there", "e there"),
    ]


def test_where_nothing_travels_over_shards_replicas_are_summed_at_once() -> None:
    assert _log("abc", alone=("shard",))[:4] == ["a@shard", "a@replica", "b@shard", "b@replica"]


def test_a_tie_is_issued_where_the_list_says_after_the_sums_before_it() -> None:
    log = _log("abc", tie="c")
    assert log[log.index("end") - 1] == "c@tie"
    assert log.index("c@replica") < log.index("c@tie")


@pytest.mark.parametrize(("shards", "replicas"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)])
def test_gradients_match_and_few_sums_are_in_flight(shards: int, replicas: int) -> None:
    expected = reference(tied=True)

    def work(world: ThreadWorld, rank: int) -> None:
        here, sums = Rank.of(world, rank, shards=shards, tied=True), Sums()
        here.gather()
        for unit in here.units:
            unit.zero_gradients()
        x, y = batch(0)
        loss_of([module for _, module in here.named], here.rows(x), here.rows(y)).backward()
        for unit in reversed(here.units):
            unit.release()
            sums.reduce(unit, "shard")
            sums.reduce(unit, "replica")
            assert sum(unit.is_reducing for unit in here.units) <= 2 * IN_FLIGHT
            assert replicas > 1 or sum(unit.is_reducing for unit in here.units) <= IN_FLIGHT
        for unit in here.units:
            sums.settle(unit)
            unit.wait_reduced()
        assert_same(here.reduced(), expected, 1e-12)

    run_threads(shards * replicas, work)
