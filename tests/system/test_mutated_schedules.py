"""Right schedules with one fault: refused, or harmless.

A dropped or repeated action and a wrong peer are always refused. Two swapped actions may leave a
schedule right; then it is performed, and must give the gradients of the uncut model.
"""

from collections import Counter
from random import Random
from typing import NamedTuple

import pytest

from terashard.comm.mesh import Mesh
from terashard.errors import ScheduleError
from terashard.plan.plan import stage_units
from terashard.schedule.check import check
from terashard.schedule.schedule import Schedule
from tests.helpers.layouts import RankOutcome, Setting, Whole, run_plan, step_once
from tests.helpers.mutations import mutate

SEED = 3
EACH, SWAPS = 200, 150
"""Mutations of every setting, one at a time; swaps of the setting that is scrambled."""
SETTINGS = (
    Setting(stages=2, micros=3, cut="unequal"),
    Setting(stages=4, cut="equal", order="fill_drain"),
    Setting(stages=2, shards=2, tied=True, micros=1, cut="equal"),
    Setting(stages=2, shards=2, family="gpt2", micros=3, cut="equal", order="fill_drain"),
    Setting(stages=2, replicas=2, tied=True, cut="mixed"),
    Setting(stages=3, tied=True, micros=3, cut="equal"),
)


class Case(NamedTuple):
    """One mutation, and whether ``check`` let it pass."""

    kind: str
    description: str
    schedule: Schedule
    passes: bool


def _right(setting: Setting) -> Schedule:
    return setting.plan.schedule(stage_units(setting.spec, setting.plan))


def _passes(schedule: Schedule) -> bool:
    try:
        check(schedule)
    except ScheduleError:
        return False
    return True


@pytest.fixture(scope="module")
def cases() -> dict[Setting, list[Case]]:
    random, found = Random(SEED), {}
    for setting in SETTINGS:
        right = _right(setting)
        mutations = [mutate(right, random) for _ in range(EACH)]
        found[setting] = [Case(*m, passes=_passes(m.schedule)) for m in mutations]
    return found


def test_every_mutation_but_some_swaps_is_refused(
    cases: dict[Setting, list[Case]], capsys: pytest.CaptureFixture[str]
) -> None:
    every = [case for made in cases.values() for case in made]
    refused = Counter(case.kind for case in every if not case.passes)
    accepted = Counter(case.kind for case in every if case.passes)
    with capsys.disabled():
        print(f"\nmutations, seed {SEED}: refused {dict(refused)}, accepted {dict(accepted)}")
    assert len(every) >= 1_000
    assert set(accepted) == {"swap"}
    assert min(refused[kind] for kind in ("drop", "duplicate", "wrong_peer", "swap")) > 0


def _require_exact(setting: Setting, schedules: list[Schedule], names: list[str]) -> None:
    """Perform them one after the other on the same pipelines."""

    def rank(mesh: Mesh) -> list[RankOutcome]:
        pipeline, found = setting.pipeline(mesh), []
        for schedule in schedules:
            pipeline.use_schedule(schedule)
            found.append(step_once(pipeline, setting.batch))
        return found

    by_rank = run_plan(setting.plan, rank)
    for name, ranks in zip(names, zip(*by_rank, strict=True), strict=True):
        try:
            Whole.of(ranks).require(setting.witness)
        except AssertionError as error:
            error.add_note(name)
            raise


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_accepted_swaps_give_the_gradients_of_the_uncut_model(
    cases: dict[Setting, list[Case]], setting: Setting
) -> None:
    accepted = [case for case in cases[setting] if case.passes]
    assert accepted
    _require_exact(setting, [c.schedule for c in accepted], [c.description for c in accepted])


def _require_exact_scrambles(setting: Setting, seeds: range) -> None:
    schedules = []
    for seed in seeds:
        random, right = Random(seed), _right(setting)
        schedule = right
        for _ in range(SWAPS):
            swapped = mutate(schedule, random, "swap").schedule
            schedule = swapped if _passes(swapped) else schedule
        assert schedule != right
        schedules.append(schedule)
    _require_exact(setting, schedules, [f"seed {seed}" for seed in seeds])


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_many_accepted_swaps_together_give_them_too(setting: Setting) -> None:
    _require_exact_scrambles(setting, range(1))


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_twenty_scrambled_schedules_give_them_too(setting: Setting) -> None:
    _require_exact_scrambles(setting, range(20))
