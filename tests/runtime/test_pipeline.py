"""The public face: what fits is exact, frozen or not; what does not fit is refused on all ranks."""

import copy
import io
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from terashard.comm.mesh import Mesh
from terashard.errors import RunError, ScheduleError
from terashard.nn.init import Initialiser
from terashard.nn.protocols import Carry, StageModule, TokenSlice
from terashard.runtime.pipeline import Pipeline
from terashard.schedule.actions import Reduce
from tests.helpers.layouts import (
    FLOAT64,
    RankOutcome,
    Setting,
    Whole,
    gradient_rows,
    run_plan,
    step_on_threads,
    step_once,
)
from tests.helpers.models import (
    WIDTH,
    UserStage,
    decoder_stages,
    sample,
    user_loss,
    user_stages,
    user_units,
    user_witness,
)
from tests.runtime.refusals import build, said, two_micros

Named = list[tuple[str, nn.Module]]


class _Nothing(nn.Module):
    """A unit without parameters."""

    def forward(self, x: Tensor, carry: Carry | None, where: TokenSlice) -> Tensor:
        return x * 2.0


def _freeze(named: Named, *names: str) -> None:
    for name, unit in named:
        if name in names:
            unit.requires_grad_(False)


CHANGES: dict[str, Callable[[Named], None]] = {
    "the first unit frozen": lambda named: _freeze(named, "unit0"),
    "the first stage frozen": lambda named: _freeze(named, "unit0", "unit1"),
    "a unit in the middle frozen": lambda named: _freeze(named, "unit2"),
    "the last stage frozen": lambda named: _freeze(named, "unit2", "unit3", "unit4"),
    "one parameter frozen": lambda named: named[1][1].gate.weight.requires_grad_(False),
    "a unit without parameters": lambda named: named.insert(2, ("nothing", _Nothing())),
}


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_frozen_and_empty_units_leave_all_other_gradients_exact(
    change: Callable[[Named], None], ranks: tuple[int, int]
) -> None:
    stages, shards = ranks
    batch = sample(2 * shards, 6)
    stage = user_stages(stages, change)
    whole = step_on_threads(two_micros(stages, shards), stage, user_loss, batch)
    wanted = user_witness(batch, change)
    assert whole.gradients.keys() == wanted.gradients.keys()
    whole.require(wanted)


def test_a_stage_without_any_parameter_passes_gradients_on() -> None:
    def stage(index: int) -> StageModule:
        return UserStage([user_units()[:3], [("nothing", _Nothing())]][index])

    def plain(named: Named) -> None:
        named[3:] = [("nothing", _Nothing())]

    batch = sample(2, 6)
    step_on_threads(two_micros(2), stage, user_loss, batch).require(user_witness(batch, plain))


def test_when_everything_is_frozen_a_step_gives_the_loss_and_no_gradients() -> None:
    def freeze(named: Named) -> None:
        _freeze(named, *(name for name, _ in named))

    def rank(mesh: Mesh) -> float:
        pipeline = Pipeline(
            user_stages(2, freeze), two_micros(2), mesh, loss=user_loss, precision=FLOAT64
        )
        batch = sample(2, 6)
        result = pipeline.step(batch.tokens, batch.targets)
        assert result.gradient_norm == 0.0
        assert gradient_rows(pipeline) == {}
        return result.loss

    wanted = user_witness(sample(2, 6)).loss
    assert run_plan(two_micros(2), rank) == [pytest.approx(wanted, rel=1e-12)] * 2


def test_frozen_units_are_not_summed() -> None:
    def rank(mesh: Mesh) -> list[str]:
        stages = user_stages(2, CHANGES["the first stage frozen"])
        schedule = build(mesh, stages).schedule
        return [str(a) for actions in schedule for a in actions if isinstance(a, Reduce)]

    assert set(run_plan(two_micros(2, 2), rank)[0]) == {"A1:0@shard", "A1:1@shard", "A1:2@shard"}


def test_all_targets_ignored_gives_no_loss_and_no_gradients() -> None:
    setting = Setting(stages=2, shards=2, tied=True, cut="equal")

    def rank(mesh: Mesh) -> None:
        pipeline = setting.pipeline(mesh)
        tokens, targets = setting.batch.part(mesh.data.rank, mesh.data.size)
        result = pipeline.step(tokens, torch.full_like(targets, -100))
        assert (result.loss, result.tokens, result.gradient_norm) == (0.0, 0, 0.0)
        assert pipeline.evaluate(tokens, torch.full_like(targets, -100)) == (0.0, 0)
        assert all(not rows.any() for rows in gradient_rows(pipeline).values())

    run_plan(setting.plan, rank)


def test_a_loss_that_is_no_number_reaches_every_rank_and_harms_no_later_step() -> None:
    setting = Setting(stages=2, tied=True, cut="equal")

    def rank(mesh: Mesh) -> RankOutcome:
        pipeline = setting.pipeline(mesh)
        some = pipeline.units[0].parameters[-1].local
        kept = some.clone()
        some.fill_(math.nan)
        broken = step_once(pipeline, setting.batch)
        assert math.isnan(broken.loss)
        assert math.isnan(broken.norm)
        some.copy_(kept)
        return step_once(pipeline, setting.batch)

    Whole.of(run_plan(setting.plan, rank)).require(setting.witness)


def test_signals_are_summed_over_all_ranks() -> None:
    setting = Setting(stages=2, shards=2)

    def rank(mesh: Mesh) -> tuple[float, ...]:
        batch = setting.batch.part(mesh.data.rank, mesh.data.size)
        return setting.pipeline(mesh).step(*batch, signals=[mesh.rank, 1.0]).signals

    assert run_plan(setting.plan, rank) == [(6.0, 4.0)] * 4


@pytest.mark.parametrize("shape", [(2, 5), (1, 6), (2, 6, 1), (12,)])
def test_a_batch_of_another_shape_is_refused_before_anything_runs(shape: tuple[int, ...]) -> None:
    def rank(mesh: Mesh) -> None:
        pipeline = Pipeline(user_stages(1), two_micros(), mesh, loss=user_loss, precision=FLOAT64)
        wrong, batch = torch.zeros(shape, dtype=torch.long), sample(2, 6)
        for tokens, targets in ((wrong, batch.targets), (batch.tokens, wrong)):
            for run in (pipeline.step, pipeline.evaluate):
                with pytest.raises(RunError, match=r"the plan works on \(2, 6\)"):
                    run(tokens, targets)
        pipeline.step(batch.tokens, batch.targets)

    run_plan(two_micros(), rank)


def test_a_plan_for_another_mesh_is_refused() -> None:
    sentence = said(lambda mesh: build(mesh, user_stages(2), two_micros(1, 2)))
    assert sentence.startswith(
        "the plan has 1 replicas x 1 stages x 2 shards, but the mesh has 1 x 2"
    )


def test_both_sides_of_a_tie_may_be_frozen() -> None:
    setting = Setting(stages=2, tied=True, family="gpt2", cut="equal")

    def rank(mesh: Mesh) -> RankOutcome:
        module = decoder_stages(setting.spec, setting.plan)(mesh.rank)
        for part, name in ((module.embed, "tokens"), (module.head, "output")):
            if part is not None:
                getattr(part, name).requires_grad_(False)
        fill = Initialiser(setting.spec, 0)
        pipeline = Pipeline(module, setting.plan, mesh, precision=FLOAT64, fill=fill)
        return step_once(pipeline, setting.batch)

    found = Whole.of(run_plan(setting.plan, rank)).gradients
    wanted = setting.witness
    trained = {n: g for n, g in wanted.gradients.items() if n != "embed.tokens.weight"}
    assert found.keys() == trained.keys()
    assert replace(wanted, gradients=trained).error(found) <= 1e-10


def test_what_is_no_stage_is_refused_by_name() -> None:
    sentence = said(lambda mesh: build(mesh, lambda i: nn.Identity()), stages=1)
    assert sentence.startswith("stage 0 is a Identity, which is no StageModule")


def test_a_class_is_a_function_from_stage_index_to_module() -> None:
    class Whole(UserStage):
        width = WIDTH

        def __init__(self, index: int) -> None:
            super().__init__(user_units())

    batch = sample(2, 6)
    step_on_threads(two_micros(), Whole, user_loss, batch).require(user_witness(batch))


def test_weights_that_are_no_longer_tied_are_noticed() -> None:
    setting = Setting(stages=2, tied=True)

    def rank(mesh: Mesh) -> str:
        pipeline = setting.pipeline(mesh)
        pipeline.require_equal_ties()
        if mesh.rank == 1:
            dict(pipeline.named_parameters())["head.output.weight"].data.to_local()[3, 5] += 1e-6
        with pytest.raises(RunError) as caught:
            pipeline.require_equal_ties()
        return str(caught.value)

    for sentence in run_plan(setting.plan, rank):
        assert "no longer equal: embed.tokens.weight and head.output.weight" in sentence


def test_schedules_that_are_wrong_foreign_or_not_everybodys_are_refused() -> None:
    setting = Setting(stages=2, micros=3, cut="equal")

    def rank(mesh: Mesh) -> None:
        pipeline = setting.pipeline(mesh)
        mine = pipeline.schedule
        short = [list(program)[:-1] for program in mine]
        with pytest.raises(ScheduleError, match="is missing"):
            pipeline.use_schedule(mine.with_actions(short))
        with pytest.raises(ScheduleError, match="of another grid"):
            pipeline.use_schedule(setting.plan.schedule())
        with pytest.raises(ScheduleError, match="forward only"):
            pipeline.use_schedule(setting.plan.evaluation(mine.units))
        other = Setting(stages=2, micros=3, cut="equal", order="fill_drain").plan.schedule(
            mine.units
        )
        with pytest.raises(ScheduleError, match="not the same on all ranks"):
            pipeline.use_schedule(mine if mesh.rank else other)
        assert pipeline.schedule is mine
        pipeline.use_schedule(other)
        assert pipeline.schedule is other

    run_plan(setting.plan, rank)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_state_dict_is_a_copy_that_can_be_copied_saved_and_averaged(shards: int) -> None:
    """Regression: it held views of one flat storage, which neither deepcopy nor save could take."""
    setting = Setting(stages=1, shards=shards)

    def rank(mesh: Mesh) -> None:
        pipeline = setting.pipeline(mesh)
        state = pipeline.state_dict()
        before = {name: value.to_local().clone() for name, value in state.items()}
        average, file = copy.deepcopy(state), io.BytesIO()
        torch.save(state, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        for name, parameter in pipeline.named_parameters():
            parameter.data.to_local().add_(1.0)
            average[name].lerp_(parameter.detach(), 0.25)
            assert torch.equal(state[name].to_local(), before[name])
            assert torch.equal(loaded[name].to_local(), before[name])
            assert loaded[name].shape == parameter.shape
            torch.testing.assert_close(average[name].to_local(), before[name] + 0.25)

    run_plan(setting.plan, rank)
