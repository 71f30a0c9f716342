"""Ranks and stages that do not fit together are refused by all ranks, with one sentence."""

import pytest
import torch
from torch import nn

from terashard.comm.mesh import Mesh
from terashard.plan.plan import Plan, stage_units, unit_sizes
from terashard.runtime.pipeline import Pipeline
from terashard.runtime.table import StageCard, StageTable
from terashard.schedule.actions import MicroBatch
from terashard.shard.precision import Precision
from tests.helpers.layouts import FLOAT64, Setting
from tests.helpers.models import Plain, UserStage, decoder_stages, user_loss, user_stages
from tests.helpers.threads import run_mesh
from tests.runtime.refusals import build, said, two_micros

Named = list[tuple[str, nn.Module]]


def test_ranks_with_different_plans_are_refused() -> None:
    def make(mesh: Mesh) -> Pipeline:
        partition = (MicroBatch(2, ((3, 3), (2, 4))[mesh.rank]),)
        return build(mesh, user_stages(2), Plan(stages=2, partition=partition))

    assert said(make).startswith("rank 1 runs another plan or precision than rank 0")


def test_ranks_with_different_precisions_are_refused() -> None:
    def make(mesh: Mesh) -> Pipeline:
        precision = (FLOAT64, Precision())[mesh.rank]
        return Pipeline(user_stages(2), two_micros(2), mesh, loss=user_loss, precision=precision)

    assert said(make).startswith("rank 1 runs another plan or precision than rank 0")


def test_shards_with_different_parameters_are_refused() -> None:
    def make(mesh: Mesh) -> Pipeline:
        def change(named: Named) -> None:
            if mesh.rank == 3:
                named[4][1].up.requires_grad_(False)

        return build(mesh, user_stages(2, change))

    sentence = said(make, shards=2)
    assert sentence.startswith("rank 3 built stage 1 otherwise than rank 2")


def test_stages_of_different_widths_are_refused() -> None:
    sentence = said(lambda mesh: build(mesh, lambda i: UserStage([(f"u{i}", Plain())], 16 + i)))
    assert sentence.startswith("stage 1 is 17 channels wide, stage 0 16")


def test_a_stage_without_units_is_refused() -> None:
    sentence = said(lambda mesh: build(mesh, lambda i: UserStage([("u", Plain())] * (1 - i))))
    assert sentence == "stage 1 has no units; every stage needs at least one"


def test_two_units_of_one_name_are_refused() -> None:
    sentence = said(lambda mesh: build(mesh, lambda i: UserStage([("unit", Plain())])))
    assert sentence.startswith("2 units or parameters of the pipeline are called unit;")
    same = [("unit", Plain()), ("unit", Plain())]
    sentence = said(lambda mesh: build(mesh, lambda i: UserStage(same)))
    assert sentence.startswith("two units of a stage are called unit;")


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_the_decoders_units_are_those_that_the_plan_foretells(
    tied: bool, stages: int, replicas: int
) -> None:
    """Regression: which sums a unit goes through was written twice."""
    setting = Setting(tied=tied, stages=stages, replicas=replicas)
    build_one = decoder_stages(setting.spec, setting.plan)
    table = StageTable([StageCard.of(build_one(index)) for index in range(stages)])
    assert table.units(setting.plan) == stage_units(setting.spec, setting.plan)
    assert table.sizes(4) == unit_sizes(setting.spec, 4, stages=stages), "a tied weight counts once"


class _Stage(UserStage):
    """A stage that says what it is told to say."""

    def __init__(self, index: int, head: int = -1, ties: tuple[int, dict[str, str]] = (9, {})):
        super().__init__([(f"u{index}", Plain().to(torch.float64))])
        self._head, self._ties = index == head, ties[1] if ties[0] == index else {}

    def has_head(self) -> bool:
        return self._head

    def ties(self) -> dict[str, str]:
        return self._ties


def test_a_head_before_the_last_stage_is_refused() -> None:
    sentence = said(lambda mesh: build(mesh, lambda i: _Stage(i, head=0)))
    assert sentence == "stage 0 has a head, but only the last stage computes the loss"


BAD_TIES = {
    "from the first": (0, {"u0.up.weight": "u1.up.weight"}, "stage 0 ties u0.up.weight to"),
    "to nothing": (1, {"u1.up.weight": "u0.upp.weight"}, "stage 1 ties u1.up.weight to"),
    "to another shape": (1, {"u1.up.weight": "u0.down.weight"}, "u1.up.weight is tied to"),
    "of nothing": (1, {"u1.upp.weight": "u0.up.weight"}, "u1.upp.weight is tied to"),
}


@pytest.mark.parametrize(("stage", "ties", "message"), BAD_TIES.values(), ids=BAD_TIES)
def test_a_tie_that_cannot_be_is_refused(stage: int, ties: dict[str, str], message: str) -> None:
    sentence = said(lambda mesh: build(mesh, lambda i: _Stage(i, ties=(stage, ties))))
    assert sentence.startswith(message)


def test_a_tie_of_which_one_side_is_frozen_is_refused() -> None:
    setting = Setting(stages=2, tied=True)

    def make(mesh: Mesh) -> None:
        module = decoder_stages(setting.spec, setting.plan)(mesh.rank)
        if module.embed is not None:
            module.embed.requires_grad_(False)
        Pipeline(module, setting.plan, mesh)

    assert "both train or neither" in said(make)


def test_a_head_that_shares_the_embeddings_weight_borrows_it_in_the_schedule() -> None:
    # Only the worker knew it: check proved schedules that read the weight after its release.
    def borrows(mesh: Mesh, tied: bool) -> list[tuple[str, ...]]:
        setting = Setting(stages=mesh.stages, shards=mesh.shards, tied=tied)
        units = setting.pipeline(mesh).schedule.units
        assert units == stage_units(setting.spec, setting.plan)
        return [unit.borrows for stage in units for unit in stage if unit.borrows]

    assert run_mesh(lambda mesh: borrows(mesh, True), shards=2) == [[("embed",)]] * 2
    assert run_mesh(lambda mesh: borrows(mesh, False), shards=2) == [[]] * 2
    assert run_mesh(lambda mesh: borrows(mesh, True), stages=2) == [[]] * 2
