"""Pipelines that must not come to be, and the one sentence with which all ranks say so."""

from collections.abc import Callable

import pytest

from terashard.comm.mesh import Mesh
from terashard.errors import PlanError
from terashard.plan.plan import Plan
from terashard.runtime.pipeline import Pipeline
from terashard.schedule.actions import MicroBatch
from tests.helpers.layouts import FLOAT64, run_plan
from tests.helpers.models import user_loss


def two_micros(stages: int = 1, shards: int = 1) -> Plan:
    """Two sequences of six tokens per data-parallel rank, one of them in slices."""
    return Plan(
        stages=stages, shards=shards, partition=(MicroBatch(1, (2, 4)), MicroBatch(1, (6,)))
    )


def build(mesh: Mesh, stages: Callable[[int], object], plan: Plan | None = None) -> Pipeline:
    """A pipeline of stages of one's own on the whole mesh."""
    plan = plan or two_micros(mesh.stages, mesh.shards)
    return Pipeline(stages, plan, mesh, loss=user_loss, precision=FLOAT64)  # type: ignore[arg-type]


def said(make: Callable[[Mesh], object], *, stages: int = 2, shards: int = 1) -> str:
    """What all ranks say; each must refuse of its own accord, so that none is left waiting."""

    def rank(mesh: Mesh) -> str:
        with pytest.raises(PlanError) as caught:
            make(mesh)
        return str(caught.value)

    (sentence,) = set(run_plan(two_micros(stages, shards), rank))
    return sentence
