"""What a step costs besides its work: when the device is waited for, and what travels."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from terashard.comm.mesh import Mesh
from terashard.shard.residence import Traffic
from tests.helpers.layouts import run_plan
from tests.helpers.models import sample, user_loss, user_stages
from tests.runtime.refusals import build, two_micros


class _Readings(TorchDispatchMode):
    """Counts the tensors that are read back as Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_step_waits_for_the_device_at_its_end_only() -> None:
    """Regression: the number of target tokens was read back before the first action."""

    def rank(mesh: Mesh) -> None:
        pipeline, batch = build(mesh, user_stages(1)), sample(2, 6)
        pipeline.loss = _Ignoring()
        pipeline.step(batch.tokens, batch.targets)
        with _Readings() as readings:
            pipeline.step(batch.tokens, batch.targets)
        assert readings.count == 0

    run_plan(two_micros(), rank)


class _Ignoring:
    ignore_index = -100

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        return user_loss(output, targets)


def test_traffic_is_that_of_all_units() -> None:
    def rank(mesh: Mesh) -> None:
        pipeline = build(mesh, user_stages(2))
        assert pipeline.traffic() == Traffic()
        pipeline.step(*sample(4, 6).part(mesh.data.rank, mesh.data.size))
        bytes_held = sum(p.numel() * 8 for p in pipeline.parameters())
        units = len(pipeline.units)
        assert pipeline.traffic() == Traffic(units, bytes_held, units, bytes_held)

    run_plan(two_micros(2, 2), rank)
