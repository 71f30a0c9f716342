"""Copies that were built with different values are refused by all ranks, with one sentence.

Regression: modules with values were trusted to be the same on all ranks. Two replicas that were
not trained on without an error, each with a model of its own.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from terashard.comm.mesh import Mesh
from terashard.errors import RunError
from terashard.nn.init import Initialiser
from terashard.plan.plan import Plan
from terashard.runtime.agree import digest
from terashard.runtime.pipeline import Pipeline
from terashard.schedule.actions import MicroBatch
from tests.helpers.layouts import FLOAT64, Setting, run_plan
from tests.helpers.models import decoder_stages, user_stages
from tests.runtime.refusals import build

Named = list[tuple[str, nn.Module]]


def _said(make: Callable[[Mesh], object], **ranks: int) -> str:
    """What all ranks say; each must refuse of its own accord, so that none is left waiting."""

    def rank(mesh: Mesh) -> str:
        with pytest.raises(RunError) as caught:
            make(mesh)
        return str(caught.value)

    (sentence,) = set(run_plan(_plan(**ranks), rank))
    return sentence


def _plan(**ranks: int) -> Plan:
    return Plan(partition=(MicroBatch(1, (2, 4)),), **ranks)


def _with_another_value(wrong: int) -> Callable[[Mesh], object]:
    def make(mesh: Mesh) -> object:
        def change(named: Named) -> None:
            if mesh.rank == wrong:
                named[4][1].up.weight.data[0, 0] += 1e-9

        plan = _plan(stages=mesh.stages, shards=mesh.shards, replicas=mesh.replicas)
        return build(mesh, user_stages(mesh.stages, change), plan)

    return make


@pytest.mark.parametrize(
    ("ranks", "wrong", "first"),
    [
        ({"replicas": 2}, 1, 0),
        ({"shards": 2}, 1, 0),
        ({"stages": 2, "shards": 2}, 3, 2),
        ({"stages": 2, "replicas": 2}, 3, 1),
    ],
    ids=str,
)
def test_copies_with_other_values_are_refused_by_name(
    ranks: dict[str, int], wrong: int, first: int
) -> None:
    sentence = _said(_with_another_value(wrong), **ranks)
    assert sentence.startswith(
        f"parameter unit4.up.weight has other values on rank {wrong} than on rank {first};"
    )


def test_replicas_that_are_filled_differently_are_refused() -> None:
    """Modules on meta have no values to compare: what counts is what the fill gave."""
    setting = Setting(stages=2, replicas=2)

    def rank(mesh: Mesh) -> str:
        stages = decoder_stages(setting.spec, setting.plan)
        seed = Initialiser(setting.spec, mesh.coordinates.replica)
        with pytest.raises(RunError) as caught:
            Pipeline(stages, setting.plan, mesh, precision=FLOAT64, fill=seed)
        return str(caught.value)

    (sentence,) = set(run_plan(setting.plan, rank))
    assert "has other values on rank 2 than on rank 0" in sentence


def test_tied_weights_that_begin_apart_are_refused() -> None:
    setting = Setting(stages=2, tied=True)

    def rank(mesh: Mesh) -> str:
        stages = decoder_stages(setting.spec, setting.plan)
        seed = Initialiser(setting.spec, mesh.coordinates.stage)
        with pytest.raises(RunError) as caught:
            Pipeline(stages, setting.plan, mesh, precision=FLOAT64, fill=seed)
        return str(caught.value)

    (sentence,) = set(run_plan(setting.plan, rank))
    assert sentence.startswith(
        "head.output.weight on rank 1 is tied to embed.tokens.weight on rank 0, but has other"
    )


def test_a_0_dim_parameter_is_one_on_all_shards() -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.empty((), device="meta", dtype=torch.float64))

    def make(mesh: Mesh) -> object:
        stages = user_stages(1, lambda named: named.insert(1, ("gain", Gain())))
        fill = {True: torch.zeros(()), False: torch.ones(())}[mesh.rank == 0]
        return Pipeline(
            _OnMeta(stages(0)), _plan(shards=2), mesh, fill=lambda n, s, r: fill.expand(_cut(s, r))
        )

    assert _said(make, shards=2).startswith("parameter gain.gain has other values on rank 1 than")


class _OnMeta:
    """A stage without any values."""

    def __init__(self, stage: object) -> None:
        self._stage = stage
        for _, unit in stage.units():  # type: ignore[attr-defined]
            unit.to("meta")

    def __getattr__(self, name: str) -> object:
        return getattr(self._stage, name)


def _cut(shape: torch.Size, rows: tuple[int, int]) -> torch.Size:
    return torch.Size((rows[1] - rows[0], *shape[1:])) if shape else shape


def test_digests_tell_one_bit_apart_in_every_type_and_shape() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for shape in ((), (3,), (2, 3)):
            one = torch.ones(shape, dtype=dtype)
            other = one.clone()
            other.view(-1)[-1] *= 1 + torch.finfo(dtype).eps
            assert digest(one) == digest(one.clone()) != digest(other)
    assert digest(torch.empty(0, 4)) == digest(torch.empty(0, 4))
    assert digest(torch.arange(6.0).view(2, 3).t()) == digest(
        torch.arange(6.0).view(2, 3).t().contiguous()
    )
