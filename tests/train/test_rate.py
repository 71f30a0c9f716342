"""Parts of the peak rate against their closed forms, at the ends and in between."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from terashard.config.schema import OptimizerConfig
from terashard.train.rate import part_of_peak

BASE = OptimizerConfig(lr=2.0, warmup=4, final_lr=0.1, decay=0.25)


def rates(schedule: str, steps: int = 24, **settings: float) -> list[float]:
    config = replace(BASE, schedule=schedule, **settings)  # type: ignore[arg-type]
    return [part_of_peak(config, step, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
def test_warm_up_rises_in_equal_steps_to_the_peak(schedule: str) -> None:
    assert rates(schedule)[:4] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_first_step_after_warm_up_has_the_peak_and_the_last_the_final_rate(
    schedule: str,
) -> None:
    found = rates(schedule)
    assert found[4] == pytest.approx(1.0, rel=1e-15)
    assert found[-1] == pytest.approx(0.1, rel=1e-15)
    assert found[4:] == sorted(found[4:], reverse=True)


def test_constant_stays_at_the_peak() -> None:
    assert set(rates("constant")[4:]) == {1.0}


def test_cosine_and_linear_follow_their_formulas() -> None:
    for step in range(4, 24):
        x = (step - 4) / 19
        cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * x)) / 2
        assert rates("cosine")[step] == pytest.approx(cosine, rel=1e-14)
        assert rates("linear")[step] == pytest.approx(1 - 0.9 * x, rel=1e-14)


def test_wsd_is_stable_before_the_last_quarter() -> None:
    found = rates("wsd")
    assert set(found[4:19]) == {1.0}
    assert found[18] == 1.0 > found[19]
    falls = [a - b for a, b in pairwise(found[18:])]
    assert falls == pytest.approx([falls[0]] * 5)


def test_runs_shorter_than_their_warm_up_and_of_one_step_have_a_rate() -> None:
    assert rates("cosine", steps=2) == [0.25, 0.5]
    assert rates("linear", steps=1, warmup=0) == [1.0]
    assert rates("wsd", steps=1, warmup=0, decay=1.0) == [1.0]
