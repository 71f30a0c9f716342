"""Ranks that use different units issue the same; records become one sequence, or none."""

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import permutations
from random import Random

import pytest

from terashard.shard.order import Order, common, follows, merged


def issued(order: Order, used: Sequence[str]) -> list[str]:
    """The collectives of a phase in which this rank uses ``used``; extra ones are marked."""
    order.begin()
    told = []
    for name in used:
        passed = order.reach(name)
        told += [f"{name}!"] if passed is None else [*passed, name]
    return [*told, *order.rest()]


@pytest.mark.parametrize("used", ["", "a", "d", "bd", "abcd", "ac"])
def test_whatever_subset_a_rank_uses_it_issues_the_whole_sequence(used: str) -> None:
    order = Order("abcd")
    assert issued(order, used) == list("abcd")
    assert order.record == list(used)
    assert order.is_followed


@pytest.mark.parametrize(
    ("used", "expected"),
    [("aba", "a b a! c d"), ("ba", "a b a! c d"), ("aa", "a a! b c d"), ("da", "a b c d a!")],
)
def test_a_unit_that_does_not_come_again_is_extra_and_deviates(used: str, expected: str) -> None:
    order = Order("abcd")
    assert issued(order, used) == expected.split()
    assert not order.is_followed


def test_a_unit_agreed_twice_may_be_used_twice_or_never_but_not_once() -> None:
    order = Order("abac")
    for used, good in [("abac", True), ("bc", True), ("abc", False), ("aabc", False)]:
        issued(order, used)
        assert order.is_followed is good, used


def test_a_gather_issued_ahead_is_issued_once_and_its_use_is_recorded_in_its_turn() -> None:
    order = Order("abc")
    order.begin()
    assert order.reach("a") == ()
    assert order.reach("b", ahead=True) == ()
    assert order.record == ["a"]
    assert order.reach("b") == ()
    assert order.reach("c") == ()
    assert order.record == ["a", "b", "c"]
    assert order.is_followed


def test_a_phase_begins_where_the_sequence_begins() -> None:
    order = Order("abc")
    assert issued(order, "c") == issued(order, "c") == list("abc")
    assert order.record == ["c"]


def test_distance_counts_what_comes_before() -> None:
    order = Order("abcab")
    order.begin()
    assert order.distance("a") == 0
    order.reach("b")
    assert [order.distance(name) for name in "cab"] == [0, 1, 2]
    order.rest()
    assert order.distance("a") == 0


def test_units_that_nobody_used_stay_beside_their_former_neighbours() -> None:
    for record, former, expected in [
        ("ad", "abcd", "abcd"),
        ("da", "abcd", "dabc"),
        ("", "abc", "abc"),
        ("bcb", "abc", "abcb"),
        ("aba", "abc", "abca"),
    ]:
        kept = frozenset(former) | frozenset(record)
        assert "".join(merged(record, former, kept)) == expected, record
    assert merged("ad", "abcd", frozenset("c")) == tuple("acd")


def test_adopted_is_the_record_with_what_is_kept_and_it_is_confirmed() -> None:
    order = Order("abcd")
    assert not order.is_confirmed
    order.adopt("dab", kept="abcd")
    assert order.agreed == ("d", "a", "b", "c")
    assert order.is_confirmed
    assert issued(order, "b") == list("dabc")


@pytest.mark.parametrize(
    ("records", "agreed"),
    [
        (["abc", "abc"], "abc"),
        (["abc", "ac", ""], "abc"),
        (["abd", "acd"], "abcd"),
        (["ab", "ac"], "abc"),
        (["ab", "cb", "ac"], "acb"),
        (["aba", "b", "c"], "abac"),
        (["ab", "ba"], None),
        (["aab", "ab"], None),
        (["ab", "bc", "ca"], None),
    ],
)
def test_records_that_differ_by_unused_units_alone_have_a_common_sequence(
    records: list[str], agreed: str | None
) -> None:
    found = common(records)
    assert (None if found is None else "".join(found)) == agreed


def test_two_ranks_that_branch_differently_in_their_first_pass_agree() -> None:
    """Neither record was the other's without some units, and that was taken for another order."""
    orders = [Order("abcd"), Order("abcd")]
    assert issued(orders[0], "abd") == issued(orders[1], "acd")
    agreed = common([order.record for order in orders])
    assert agreed is not None
    for order in orders:
        order.adopt(agreed, kept="abcd")
        assert order.agreed == tuple("abcd")


def test_the_agreed_sequence_stays_where_all_follow_it() -> None:
    random = Random(5)
    for _ in range(200):
        former = [random.choice("abcde") for _ in range(random.randint(1, 8))]
        used = [{n for n in "abcde" if random.random() < 0.6} for _ in range(3)]
        found = common([[n for n in former if n in some] for some in used], former)
        assert found == [n for n in former if n in set().union(*used)]


def test_common_finds_a_sequence_exactly_where_one_exists() -> None:
    """The witness tries all sequences of as many uses as the record that has most of each."""
    random = Random(7)
    found = {True: 0, False: 0}
    for _ in range(400):
        records = [
            [random.choice("abc") for _ in range(random.randint(0, 3))]
            for _ in range(random.randint(2, 3))
        ]
        uses = [n for n in "abc" for _ in range(max(record.count(n) for record in records))]
        exists = any(
            all(follows(record, sequence) for record in records)
            for sequence in set(permutations(uses))
        )
        answer = common(records)
        assert (answer is not None) is exists, records
        assert answer is None or all(follows(record, answer) for record in records)
        found[exists] += 1
    assert min(found.values()) > 80


def test_common_is_the_same_in_every_process() -> None:
    """Each process hashes texts in its own way; the answer must not depend on it."""
    program = (
        "from terashard.shard.order import common\n"
        "records = [[f'u{k}' for k in range(60) if k % 7 != r] for r in range(5)]\n"
        "records += [[f'v{r}.{k}' for k in range(5)] for r in range(5)]\n"
        "print(' '.join(common(records)))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


def test_any_ranks_issue_the_same_in_the_first_pass_and_after_adoption() -> None:
    """As a tree is used: the first pass in the order of registration, then in the adopted one."""
    random = Random(11)
    for _ in range(100):
        sequence = random.sample("abcdef", 6)
        orders = [Order("abcdef") for _ in range(4)]
        for order in orders:
            order.adopt(sequence, kept="abcdef")
        told = [issued(order, [n for n in sequence if random.random() < 0.5]) for order in orders]
        assert told == [sequence] * 4
        records = [order.record for order in orders]
        agreed = common(records, orders[0].agreed)
        assert agreed is not None
        for order in orders:
            order.adopt(agreed, kept="abcdef")
        assert len({order.agreed for order in orders}) == 1
        assert sorted(orders[0].agreed) == list("abcdef")
