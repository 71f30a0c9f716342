"""A pipeline that may hold only some units at a time trains as one that holds all of them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from terashard.comm.mesh import Mesh
from terashard.errors import PlanError
from terashard.nn.init import Initialiser
from terashard.plan.plan import Plan, spread_layers, unit_sizes
from terashard.runtime.pipeline import Pipeline
from terashard.schedule.actions import Gather, Reduce
from terashard.shard.gradient import StashedGradients
from terashard.shard.precision import Precision
from tests.helpers.models import decoder_stages, tiny_spec
from tests.helpers.threads import run_mesh

FLOAT64 = Precision(compute=torch.float64, master=torch.float64)
TOKENS = 8


def pipeline(
    mesh: Mesh,
    *,
    residency: int | None,
    order: str = "one_forward_one_backward",
    tied: bool = False,
    slices: int = 4,
    micros: int = 2,
    reduce: str = "step",
    precision: Precision = FLOAT64,
) -> Pipeline:
    spec = tiny_spec("llama", tied=tied, kv_heads=2, tokens=TOKENS)
    plan = Plan.uniform(
        sequences=micros,
        tokens=TOKENS,
        micro_batches=micros,
        slices=slices,
        stages=mesh.stages,
        shards=mesh.shards,
        replicas=mesh.replicas,
        order=order,
        layers=spread_layers(spec.num_layers, mesh.stages),
        residency=residency,
        reduce=reduce,
    )
    return Pipeline(
        decoder_stages(spec, plan), plan, mesh, precision=precision, fill=Initialiser(spec, 3)
    )


def step(made: Pipeline) -> tuple[float, dict[str, Tensor]]:
    """Loss and this rank's gradient rows of two steps, the values scaled between them."""
    spec = tiny_spec("llama", tokens=TOKENS)
    total = 0.0
    for number in range(2):
        generator = torch.Generator().manual_seed(10 * number + made.mesh.data.rank)
        words = torch.randint(
            0, spec.vocab_size, (made.plan.sequences, TOKENS + 1), generator=generator
        )
        total += made.step(words[:, :-1].contiguous(), words[:, 1:].contiguous()).loss
        with torch.no_grad():
            for p in made.parameters():
                p._local_tensor.mul_(1.1)  # type: ignore[attr-defined]
    return total, {
        name: p.grad._local_tensor.clone()  # type: ignore[union-attr]
        for name, p in made.named_parameters()
    }


def budgets(mesh: Mesh, tied: bool) -> list[int]:
    """The least budget for every stage, one more layer, and nearly everything; alike everywhere."""
    made = pipeline(mesh, residency=None, tied=tied)
    units = sorted(sum(p.form.nbytes for p in unit.parameters) for unit in made.units)
    lent = units[-2] if tied and mesh.stages == 1 else 0
    mine = f"{units[-1] + lent} {units[0]} {sum(units)}"
    said = [list(map(int, text.split())) for text in mesh.world.gather_bytes(mine.encode())]
    least, one, every = (max(column) for column in zip(*said, strict=True))
    return [least, least + one, every - 1]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("order", ["fill_drain", "one_forward_one_backward"])
@pytest.mark.parametrize(
    ("stages", "shards", "replicas"), [(1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2)]
)
def test_every_budget_gives_the_gradients_of_none(
    stages: int, shards: int, replicas: int, order: str, tied: bool
) -> None:
    def rank(mesh: Mesh) -> None:
        loss, expected = step(pipeline(mesh, residency=None, order=order, tied=tied))
        for budget in budgets(mesh, tied):
            made = pipeline(mesh, residency=budget, order=order, tied=tied)
            found, gradients = step(made)
            assert found == pytest.approx(loss, rel=1e-12)
            for name, rows in expected.items():
                torch.testing.assert_close(gradients[name], rows, rtol=1e-10, atol=1e-12)

    run_mesh(rank, stages=stages, shards=shards, replicas=replicas)


@pytest.mark.parametrize(
    ("stages", "shards", "replicas", "order", "tied", "budgeted"),
    [
        (1, 2, 1, "fill_drain", False, True),
        (1, 3, 1, "one_forward_one_backward", True, False),
        (2, 2, 1, "fill_drain", True, True),
        (2, 2, 1, "one_forward_one_backward", False, False),
        (2, 2, 1, "one_forward_one_backward", True, True),
        (1, 2, 2, "fill_drain", False, False),
    ],
)
def test_sums_after_every_micro_batch_give_the_gradients_of_one_per_step(
    stages: int, shards: int, replicas: int, order: str, tied: bool, budgeted: bool
) -> None:
    def rank(mesh: Mesh) -> None:
        loss, expected = step(pipeline(mesh, residency=None, order=order, tied=tied, micros=3))
        budget = budgets(mesh, tied)[1] if budgeted else None
        made = pipeline(
            mesh, residency=budget, order=order, tied=tied, micros=3, reduce="micro_batch"
        )
        found, gradients = step(made)
        assert found == pytest.approx(loss, rel=1e-12)
        for name, rows in expected.items():
            torch.testing.assert_close(gradients[name], rows, rtol=1e-10, atol=1e-12)
        before, planned = made.traffic(), made.planned_traffic
        step(made)
        after = made.traffic()
        assert after.reductions - before.reductions == 2 * planned.reductions
        assert after.reduced_bytes - before.reduced_bytes == 2 * planned.reduced_bytes
        if not budgeted:
            assert planned.volumes == 1 + 3, "gathered once, summed after each of three"

    run_mesh(rank, stages=stages, shards=shards, replicas=replicas)


@pytest.mark.parametrize(
    ("stages", "shards", "replicas", "order", "tied", "budgeted"),
    [
        (1, 1, 1, "one_forward_one_backward", False, False),
        (1, 2, 1, "fill_drain", False, True),
        (1, 3, 1, "one_forward_one_backward", True, False),
        (2, 2, 1, "fill_drain", True, True),
        (2, 1, 2, "one_forward_one_backward", True, False),
    ],
)
def test_gradients_from_a_stash_are_those_of_full_ones_and_nothing_is_held_full(
    stages: int, shards: int, replicas: int, order: str, tied: bool, budgeted: bool
) -> None:
    def rank(mesh: Mesh) -> None:
        loss, expected = step(pipeline(mesh, residency=None, order=order, tied=tied, micros=3))
        budget = budgets(mesh, tied)[1] if budgeted else None
        made = pipeline(mesh, residency=budget, order=order, tied=tied, micros=3, reduce="stash")
        stashed = 0
        for unit in made.units:
            gradients = unit._new_gradients()
            assert isinstance(gradients, StashedGradients)
            stashed += len(gradients._stashes)
        assert stashed == 7 * sum(unit.name.startswith("layers") for unit in made.units)
        found, rows_of = step(made)
        assert found == pytest.approx(loss, rel=1e-12)
        for name, rows in expected.items():
            torch.testing.assert_close(rows_of[name], rows, rtol=1e-10, atol=1e-12)
        assert all(p.full.grad is None for unit in made.units for p in unit.parameters)
        if not budgeted and shards > 1:
            assert made.planned_traffic.volumes == 2.0

    run_mesh(rank, stages=stages, shards=shards, replicas=replicas)


def test_sums_after_every_micro_batch_under_bfloat16_add_up_in_float32() -> None:
    precision = Precision(compute=torch.bfloat16, master=torch.float32)

    def rank(mesh: Mesh) -> None:
        _, expected = step(pipeline(mesh, residency=None, micros=3, precision=precision))
        made = pipeline(mesh, residency=None, micros=3, reduce="micro_batch", precision=precision)
        for name, rows in step(made)[1].items():
            torch.testing.assert_close(rows, expected[name], rtol=1e-5, atol=1e-7)

    run_mesh(rank, shards=2)


@pytest.mark.parametrize(
    ("stages", "shards", "replicas"), [(1, 2, 1), (1, 3, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
)
@pytest.mark.parametrize("tied", [False, True])
def test_what_is_counted_is_what_the_list_says_and_slots_stay_within_the_budget(
    tied: bool, stages: int, shards: int, replicas: int
) -> None:
    def rank(mesh: Mesh) -> tuple[int, int]:
        whole = pipeline(mesh, residency=None, tied=tied)
        made = pipeline(mesh, residency=budgets(mesh, tied)[1], tied=tied)
        step(made)
        before = made.traffic()
        step(made)
        actions = list(made.schedule.actions(mesh.coordinates.stage))
        gathers = sum(isinstance(a, Gather) for a in actions)
        reductions = sum(isinstance(a, Reduce) for a in actions)
        after = made.traffic()
        planned = made.planned_traffic
        assert after.gathers - before.gathers == 2 * gathers == 2 * planned.gathers
        assert after.reductions - before.reductions == 2 * reductions == 2 * planned.reductions
        assert after.gathered_bytes - before.gathered_bytes == 2 * planned.gathered_bytes
        assert after.reduced_bytes - before.reduced_bytes == 2 * planned.reduced_bytes
        assert whole.planned_traffic.volumes == 2.0 < planned.volumes
        assert gathers > len(made.units)
        spec = tiny_spec("llama", tied=tied, kv_heads=2, tokens=TOKENS)
        sizes = unit_sizes(spec, 8, stages=stages)
        assert {unit.name: unit.full_bytes for unit in made.units}.items() <= sizes.items()
        places = made._places
        assert places is not None
        slots = len(places.pool.slots)
        step(made)
        assert len(places.pool.slots) == slots, "no slot is made after the first step"
        return gathers, places.nbytes

    run_mesh(rank, stages=stages, shards=shards, replicas=replicas)


def test_evaluation_keeps_to_the_budget_too() -> None:
    def rank(mesh: Mesh) -> None:
        whole = pipeline(mesh, residency=None)
        budget = max(unit.full_bytes for unit in whole.units)
        made = pipeline(mesh, residency=budget)
        spec = tiny_spec("llama", tokens=TOKENS)
        words = torch.randint(
            0, spec.vocab_size, (2, TOKENS + 1), generator=torch.Generator().manual_seed(1)
        )
        batch = words[:, :-1].contiguous(), words[:, 1:].contiguous()
        assert made.evaluate(*batch)[0] == pytest.approx(whole.evaluate(*batch)[0], rel=1e-12)

    run_mesh(rank, shards=2)


def test_a_budget_that_is_too_small_says_what_would_do() -> None:
    def rank(mesh: Mesh) -> None:
        with pytest.raises(PlanError, match="give at least that"):
            pipeline(mesh, residency=100)

    run_mesh(rank, shards=2)
    with pytest.raises(PlanError, match="holds nothing"):
        replace(Plan.uniform(sequences=1, tokens=8), residency=0)
