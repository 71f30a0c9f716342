"""The spine: however a step is cut, its loss and gradients are those of one uncut process.

All in float64 and to 1e-10. By default a pairwise cover of the settings runs; ``-m slow`` runs
their product.
"""

from itertools import product

import pytest

from terashard.comm.mesh import Mesh
from terashard.plan.plan import Plan
from terashard.schedule.actions import MicroBatch
from tests.helpers.layouts import (
    OPTIONS,
    RankOutcome,
    Setting,
    Whole,
    outcome,
    pairs_of,
    pairwise_cover,
    run_setting,
    step_on_threads,
)
from tests.helpers.models import sample, user_loss, user_stages, user_witness
from tests.helpers.processes import run_processes

SEED = 2
COVER = [Setting(**choice) for choice in pairwise_cover(OPTIONS, SEED)]


def test_cover_is_small_and_every_two_values_meet_in_it() -> None:
    print(f"pairwise cover with seed {SEED}: {len(COVER)} settings")
    assert len(COVER) <= 60
    for (one, i), (other, j) in pairs_of(OPTIONS):
        wanted = OPTIONS[one][i], OPTIONS[other][j]
        assert any((getattr(s, one), getattr(s, other)) == wanted for s in COVER), wanted


@pytest.mark.parametrize("setting", COVER, ids=str)
def test_loss_and_gradients_are_those_of_one_uncut_process(setting: Setting) -> None:
    run_setting(setting).require(setting.witness)


def _product() -> list[Setting]:
    """Every combination; key/value heads and ignored targets take turns."""
    free = [name for name in OPTIONS if name not in ("kv_heads", "ignored")]
    choices = product(*(OPTIONS[name] for name in free))
    turns = list(product(OPTIONS["kv_heads"], OPTIONS["ignored"]))
    return [
        Setting(
            **dict(zip(free, choice, strict=True)),
            kv_heads=turns[i % 4][0],
            ignored=turns[(i + i // 4) % 4][1],
        )
        for i, choice in enumerate(choices)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("setting", _product(), ids=str)
def test_every_setting_is_that_of_one_uncut_process(setting: Setting) -> None:
    run_setting(setting).require(setting.witness)


USER_PARTITIONS = {
    "whole": (MicroBatch(2, (6,)),),
    "slices": (MicroBatch(1, (2, 1, 3)), MicroBatch(1, (2, 1, 3))),
    "mixed": (MicroBatch(1, (1,) * 6), MicroBatch(1, (6,))),
}


@pytest.mark.parametrize("partition", USER_PARTITIONS.values(), ids=USER_PARTITIONS)
@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (3, 1)], ids=["1x1", "2x2", "3x1"])
def test_a_model_and_a_loss_of_ones_own_are_exact(
    partition: tuple[MicroBatch, ...], ranks: tuple[int, int]
) -> None:
    stages, shards = ranks
    plan = Plan(stages=stages, shards=shards, partition=partition)
    batch = sample(2 * shards, 6)
    whole = step_on_threads(plan, user_stages(stages), user_loss, batch)
    whole.require(user_witness(batch))


def _rank_of_processes(rank: int, setting: Setting) -> RankOutcome:
    mesh = Mesh.of_processes(stages=setting.stages, shards=setting.shards, timeout=30)
    assert mesh.rank == rank
    return outcome(setting.pipeline(mesh), setting.batch)


@pytest.mark.processes
def test_four_processes_are_as_exact_as_four_threads() -> None:
    setting = Setting(stages=2, shards=2, tied=True, micros=3, cut="unequal", ignored=True)
    Whole.of(run_processes(4, _rank_of_processes, setting)).require(setting.witness)
