"""Ten steps of training in float32: every layout has the losses and norms of one process.

Losses and *unclipped* gradient norms to 1e-5, with SGD with momentum and with AdamW: Adam hides a
wrong scale of the gradients, a norm does not.
"""

from collections.abc import Iterable
from functools import lru_cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from terashard.comm.mesh import Mesh
from terashard.nn.build import build_stage
from terashard.nn.init import initialise_
from terashard.shard.precision import Precision
from tests.helpers.layouts import Setting, run_plan
from tests.helpers.models import sample
from tests.helpers.processes import run_processes

STEPS, SEQUENCES, CLIP = 10, 12, 0.5
Curve = list[tuple[float, float]]
"""Loss and unclipped gradient norm of every step."""


def _optimizer(kind: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, fused=True)


@lru_cache(maxsize=4)
def _one_process(kind: str, setting: Setting) -> Curve:
    """The uncut model, torch's own loss and clipping."""
    spec = setting.spec
    model = build_stage(spec, range(spec.num_layers), first=True, last=True)
    initialise_(model, spec, seed=0)
    optimizer = _optimizer(kind, model.parameters())
    curve = []
    for step in range(STEPS):
        batch = sample(SEQUENCES, spec.max_length, seed=step % 2)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.targets.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    return curve


def _train(mesh: Mesh, kind: str, setting: Setting) -> Curve:
    pipeline = setting.pipeline(mesh, Precision())
    optimizer = _optimizer(kind, pipeline.parameters())
    curve = []
    for step in range(STEPS):
        batch = sample(SEQUENCES, pipeline.plan.tokens, seed=step % 2)
        result = pipeline.step(*batch.part(mesh.data.rank, mesh.data.size))
        if result.gradient_norm > CLIP:
            pipeline.scale_gradients(CLIP / result.gradient_norm)
        optimizer.step()
        curve.append((result.loss, result.gradient_norm))
    pipeline.require_equal_ties()
    return curve


def _setting(stages: int = 1, shards: int = 1) -> Setting:
    """Twelve sequences in three micro-batches on every layout."""
    each = SEQUENCES // shards
    return Setting(stages=stages, shards=shards, each=each, tied=True, micros=3, cut="unequal")


def _assert_same(found: Curve, kind: str) -> None:
    for step, (here, there) in enumerate(zip(found, _one_process(kind, _setting()), strict=True)):
        assert here == pytest.approx(there, rel=1e-5), f"step {step}: loss, gradient norm"


def test_the_curve_to_compare_with_is_clipped_and_falls() -> None:
    for kind in ("sgd", "adamw"):
        losses, norms = zip(*_one_process(kind, _setting()), strict=True)
        assert losses[-1] < losses[0]
        assert sum(norm > CLIP for norm in norms) >= STEPS // 2


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "layout", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=lambda layout: "{}x{}".format(*layout)
)
def test_ten_steps_have_the_losses_and_norms_of_one_process(
    layout: tuple[int, int], kind: str
) -> None:
    setting = _setting(*layout)
    for curve in run_plan(setting.plan, lambda mesh: _train(mesh, kind, setting)):
        _assert_same(curve, kind)


def _train_in_process(rank: int, kinds: tuple[str, ...], setting: Setting) -> list[Curve]:
    mesh = Mesh.of_processes(stages=setting.stages, shards=setting.shards, timeout=30)
    return [_train(mesh, kind, setting) for kind in kinds]


@pytest.mark.processes
def test_ten_steps_in_four_processes_have_them_too() -> None:
    kinds = ("sgd", "adamw")
    for curves in run_processes(4, _train_in_process, kinds, _setting(2, 2)):
        for kind, curve in zip(kinds, curves, strict=True):
            _assert_same(curve, kind)
