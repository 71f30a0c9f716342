from itertools import pairwise
from math import sqrt

import pytest

from terashard.data.permutation import Permutation


def order(size: int, seed: int = 0, epoch: int = 0) -> list[int]:
    permutation = Permutation.of_epoch(size, seed, epoch)
    return [permutation(position) for position in range(size)]


def test_every_size_gives_a_bijection() -> None:
    for size in range(1, 160):
        assert sorted(order(size, seed=size)) == list(range(size))


def test_a_large_range_is_a_bijection_without_memory() -> None:
    assert sorted(order(20_011)) == list(range(20_011))
    huge = Permutation.of_epoch(3_000_000_000_000, 1, 2)
    images = {huge(position) for position in range(0, 3_000_000_000_000, 3_000_000_000)}
    assert len(images) == 1000
    assert max(images) < 3_000_000_000_000


def test_the_order_depends_on_seed_and_epoch() -> None:
    orders = {tuple(order(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_the_order_never_changes() -> None:
    assert order(12, seed=7, epoch=1) == [1, 11, 9, 0, 5, 2, 4, 10, 8, 6, 3, 7]


@pytest.mark.parametrize("size", [2, 3, 7, 12])
def test_every_sample_comes_equally_often_at_every_position(size: int) -> None:
    rounds = 4000
    counts = [[0] * size for _ in range(size)]
    for epoch in range(rounds):
        for position, sample in enumerate(order(size, seed=5, epoch=epoch)):
            counts[position][sample] += 1
    expected = rounds / size
    chi2 = sum((count - expected) ** 2 / expected for row in counts for count in row)
    freedom = (size - 1) ** 2
    assert abs(chi2 - freedom) < 5 * sqrt(2 * freedom) + 5


def test_neighbours_are_torn_apart() -> None:
    shuffled = order(10_000, seed=3)
    steps = [abs(b - a) for a, b in pairwise(shuffled)]
    # Two independent uniform draws lie a third of the range apart on average.
    assert sum(steps) / len(steps) == pytest.approx(10_000 / 3, rel=0.05)
    assert sum(step == 1 for step in steps) < 15
