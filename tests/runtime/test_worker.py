"""A worker that fails says where and who waited; a step that ends holds nothing."""

import gc
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from terashard.comm.mesh import Mesh
from terashard.errors import CommunicationError, RunError
from terashard.nn.protocols import Carry, StageModule, TokenSlice
from terashard.plan.plan import Plan
from terashard.runtime.pipeline import Pipeline
from terashard.schedule.actions import Forward, MicroBatch
from tests.helpers.layouts import FLOAT64, Setting, gradient_rows, run_plan
from tests.helpers.models import sample, user_loss, user_stages, user_witness

PARTITION = (MicroBatch(2, (2, 1, 3)),)


def _batch(mesh: Mesh) -> tuple[Tensor, Tensor]:
    return sample(2 * mesh.shards, 6).part(mesh.data.rank, mesh.data.size)


def _plan(stages: int = 1, shards: int = 1) -> Plan:
    return Plan(stages=stages, shards=shards, partition=PARTITION)


def _pipeline(mesh: Mesh, stages: Callable[[int], StageModule] | None = None) -> Pipeline:
    plan = _plan(mesh.stages, mesh.shards)
    build = stages or user_stages(mesh.stages)
    return Pipeline(build, plan, mesh, loss=user_loss, precision=FLOAT64)


class _Fails(nn.Module):
    """Passes values on, and fails in one slice, as often as asked."""

    def __init__(self, slice_index: int, times: int = 1_000) -> None:
        super().__init__()
        self.slice, self.times = slice_index, times

    def forward(self, x: Tensor, carry: Carry | None, where: TokenSlice) -> Tensor:
        if where.index == self.slice and self.times:
            self.times -= 1
            raise ValueError("no such luck")
        return x


def _errors(plan: Plan, step: Callable[[Mesh], object]) -> dict[int, Exception]:
    """What every rank raised."""
    found: dict[int, Exception] = {}

    def rank(mesh: Mesh) -> None:
        try:
            step(mesh)
        except Exception as error:
            found[mesh.rank] = error
            raise

    with pytest.raises(Exception):  # noqa: B017, PT011  # the first of those that are kept
        run_plan(plan, rank)
    return found


def test_a_failure_says_where_and_the_others_say_whom_they_waited_for() -> None:
    def step(mesh: Mesh) -> None:
        def change(named: list[tuple[str, nn.Module]]) -> None:
            named.insert(3, ("fails", _Fails(2)))

        _pipeline(mesh, user_stages(mesh.stages, change)).step(*_batch(mesh))

    started = time.monotonic()
    errors = _errors(_plan(2), step)
    assert time.monotonic() - started < 10
    assert isinstance(errors[1], ValueError)
    (note,) = errors[1].__notes__
    assert note.startswith("rank 1 (replica 0, stage 1, shard 0), position ")
    assert note.endswith("this happened in F1.0.2")
    assert isinstance(errors[0], CommunicationError)
    waited = str(errors[0])
    assert waited.startswith("rank 0 (replica 0, stage 0, shard 0), position ")
    peer = "rank 1 (replica 0, stage 1, shard 0)"
    assert f"R0.0.2<1, which waits for the gradient of cell 0.0.2 from {peer}" in waited
    assert "no such luck" in waited


def test_after_a_failed_step_ranks_refuse_the_next() -> None:
    def step(mesh: Mesh) -> None:
        def change(named: list[tuple[str, nn.Module]]) -> None:
            named.insert(3, ("fails", _Fails(0, times=1)))

        pipeline = _pipeline(mesh, user_stages(mesh.stages, change))
        if mesh.rank == 0:
            pipeline.step(*_batch(mesh))  # waits, until rank 1 gives up
        with pytest.raises(ValueError, match="no such luck"):
            pipeline.step(*_batch(mesh))
        pipeline.step(*_batch(mesh))

    error = _errors(_plan(2), step)[1]
    assert isinstance(error, RunError)
    assert "an earlier step failed at position" in str(error)
    assert "F1.0.0" in str(error)


@pytest.mark.parametrize("slice_index", [0, 2])
def test_alone_the_step_after_a_failed_one_is_right(slice_index: int) -> None:
    """One rank has no messages on their way: a notebook goes on after a bad batch."""

    def step(mesh: Mesh) -> None:
        def change(named: list[tuple[str, nn.Module]]) -> None:
            named.insert(3, ("fails", _Fails(slice_index, times=2)))

        pipeline = _pipeline(mesh, user_stages(1, change))
        for run in (pipeline.step, pipeline.evaluate):
            with pytest.raises(ValueError, match="no such luck"):
                run(*_batch(mesh))
        pipeline.step(*_batch(mesh))
        assert user_witness(sample(2, 6)).error(gradient_rows(pipeline)) <= 1e-10

    run_plan(_plan(), step)


def test_a_failure_in_backward_is_refused_or_repaired_too() -> None:
    class Explodes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            if not failures:
                failures.append(1)
                raise ValueError("backward fails")
            return gradient

    failures: list[int] = []

    class Unit(nn.Module):
        def forward(self, x: Tensor, carry: Carry | None, where: TokenSlice) -> Tensor:
            return Explodes.apply(x)  # type: ignore[no-any-return]

    def step(mesh: Mesh) -> None:
        build = user_stages(1, lambda named: named.insert(1, ("explodes", Unit())))
        pipeline = _pipeline(mesh, build)
        with pytest.raises(ValueError, match="backward fails"):
            pipeline.step(*_batch(mesh))
        pipeline.step(*_batch(mesh))
        assert user_witness(sample(2, 6)).error(gradient_rows(pipeline)) <= 1e-10

    run_plan(_plan(), step)


def _activations(shapes: set[tuple[int, ...]]) -> list[Tensor]:
    gc.collect()
    found = [o for o in gc.get_objects() if type(o) is Tensor]
    return [t for t in found if tuple(t.shape) in shapes]


@pytest.mark.parametrize("verb", ["step", "evaluate"])
def test_when_a_step_ends_no_activation_is_alive(verb: str) -> None:
    setting = Setting(stages=2, micros=3, cut="unequal")
    shapes = {(1, n, 16) for n in (3, 1, 4)}
    before = len(_activations(shapes))

    def rank(mesh: Mesh) -> Pipeline:
        pipeline = setting.pipeline(mesh)
        getattr(pipeline, verb)(setting.batch.tokens, setting.batch.targets)
        return pipeline

    kept = run_plan(setting.plan, rank)
    assert len(_activations(shapes)) == before
    for pipeline in kept:
        assert not pipeline._worker._values
        assert not pipeline._stage._micros


def test_a_timeline_tells_every_action_in_order_and_without_gaps() -> None:
    setting = Setting(stages=2, micros=3, cut="equal")

    def rank(mesh: Mesh) -> None:
        pipeline = setting.pipeline(mesh)
        result = pipeline.step(setting.batch.tokens, setting.batch.targets)
        spans = result.timeline.spans
        assert [span.action for span in spans] == list(pipeline.schedule.actions(mesh.rank))
        assert {span.rank for span in spans} == {mesh.rank}
        for span, following in pairwise(spans):
            assert span.start <= span.end == following.start
        assert 0.0 <= result.idle_share < 1.0
        assert result.timeline.busy(mesh.rank) > 0
        assert sum(isinstance(span.action, Forward) for span in spans) >= 6

    run_plan(setting.plan, rank)


def test_sent_tensors_are_let_go_while_the_step_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen micro-batches: what is kept for the transport does not grow with their number."""
    from terashard.runtime import mail

    kept: list[int] = []
    receive = mail.Mail.receive

    def noting(self: mail.Mail, action: mail.Receive) -> Tensor:
        found = receive(self, action)
        kept.append(len(self._sent))
        return found

    monkeypatch.setattr(mail.Mail, "receive", noting)
    plan = Plan(stages=2, partition=(MicroBatch(1, (2, 2)),) * 16)

    def rank(mesh: Mesh) -> None:
        pipeline = Pipeline(user_stages(2), plan, mesh, loss=user_loss, precision=FLOAT64)
        batch = sample(16, 4)
        pipeline.step(batch.tokens, batch.targets)

    run_plan(plan, rank)
    assert max(kept) <= 4
