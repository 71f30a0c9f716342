"""The claims about threads over real processes, where messages and sums are truly on their way."""

import pytest
import torch

from terashard.comm.mesh import Mesh
from tests.helpers.layouts import RankOutcome, Setting, Whole, outcome
from tests.helpers.processes import run_processes

SETTING = Setting(shards=2, replicas=2, cut="equal")


def step(rank: int) -> RankOutcome:
    """Two steps of one of 2 x 2 data-parallel ranks, of six units each."""
    torch.set_num_threads(1)
    mesh = Mesh.of_processes(shards=2, replicas=2)
    pipeline = SETTING.pipeline(mesh)
    found = outcome(pipeline, SETTING.batch)
    assert not any(unit.is_reducing for unit in pipeline.units)
    return found


@pytest.mark.processes
def test_sums_over_shards_then_replicas_are_exact_between_processes() -> None:
    Whole.of(run_processes(4, step)).require(SETTING.witness)
