"""Evaluations: nothing random, any loss, nothing left behind."""

import pytest
import torch
from torch import Tensor, nn

from terashard.comm.mesh import Mesh
from terashard.nn.init import Initialiser
from terashard.nn.loss import CrossEntropy
from terashard.nn.protocols import Carry, TokenSlice
from terashard.runtime.pipeline import Pipeline
from tests.helpers.layouts import FLOAT64, Setting, run_plan
from tests.helpers.models import decoder_stages, sample, user_stages, user_witness
from tests.runtime.refusals import build, two_micros


class _Noisy(nn.Module):
    """Dropout, without noise outside of training."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, carry: Carry | None, where: TokenSlice) -> Tensor:
        return self.dropout(x)


def test_an_evaluation_runs_modules_in_evaluation_mode_and_draws_nothing() -> None:
    """Regression: they stayed in training mode; dropout made evaluations random."""

    def rank(mesh: Mesh) -> None:
        noisy, still = _Noisy(), _Noisy().eval()
        stage = user_stages(1, lambda named: named.extend([("noisy", noisy), ("still", still)]))
        pipeline = build(mesh, stage)
        batch, before = sample(2, 6), torch.get_rng_state()
        loss, _ = pipeline.evaluate(batch.tokens, batch.targets)
        assert torch.equal(torch.get_rng_state(), before)
        assert loss == pytest.approx(user_witness(batch).loss, rel=1e-12)
        assert noisy.training
        assert noisy.dropout.training
        assert not still.dropout.training

    run_plan(two_micros(), rank)


def test_modules_train_again_after_an_evaluation_that_failed() -> None:
    def rank(mesh: Mesh) -> None:
        pipeline = build(mesh, user_stages(1))
        wrong = torch.full((2, 6), 10**6)
        with pytest.raises(IndexError):
            pipeline.evaluate(wrong, wrong)
        assert all(unit.module.training for unit in pipeline.units)

    run_plan(two_micros(), rank)


def test_an_evaluation_may_have_a_loss_of_its_own() -> None:
    setting = Setting(stages=2, shards=2, cut="equal", ignored=True)

    def rank(mesh: Mesh) -> tuple[float, int]:
        spec, plan, fill = setting.spec, setting.plan, Initialiser(setting.spec, 0)
        stages, smooth = decoder_stages(spec, plan), CrossEntropy(label_smoothing=0.3, z_loss=0.1)
        pipeline = Pipeline(stages, plan, mesh, loss=smooth, precision=FLOAT64, fill=fill)
        batch = setting.batch.part(mesh.data.rank, mesh.data.size)
        own = pipeline.evaluate(*batch)
        plain = pipeline.evaluate(*batch, loss=CrossEntropy())
        assert own[0] > plain[0] + 0.1
        assert pipeline.evaluate(*batch) == own
        return plain

    wanted = setting.witness
    for found in run_plan(setting.plan, rank):
        assert found == (pytest.approx(wanted.loss, rel=1e-12), wanted.tokens)
