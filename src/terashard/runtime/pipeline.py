"""The public face of the runtime: a pipeline of stages over sharded parameters, for a training loop of one's own.

::

    pipeline = Pipeline(stages, plan, mesh, loss=loss)
    optimizer = torch.optim.AdamW(pipeline.parameters(), fused=True)
    for tokens, targets in batches:          # [S, N]: the sequences of this data-parallel rank
        result = pipeline.step(tokens, targets)
        optimizer.step()

One step runs the plan's schedule: every parameter is gathered once, every gradient summed once. The gradient is that of
the sum of the loss over all target tokens of all ranks, divided by their number, so that neither slices nor micro-batches
nor ranks change it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from terashard.comm.mesh import Mesh
from terashard.errors import PlanError, RunError
from terashard.nn.loss import CrossEntropy
from terashard.nn.protocols import StageModule
from terashard.plan.plan import Plan
from terashard.runtime.stage import Loss, Stage
from terashard.runtime.worker import Worker
from terashard.schedule.actions import Over
from terashard.schedule.schedule import Schedule, Unit
from terashard.shard.clip import scale_gradients, squared_norm
from terashard.shard.cut import make_units, named_parameters
from terashard.shard.materialise import Fill, materialise, require_written
from terashard.shard.precision import Precision
from terashard.shard.unit import ShardUnit
from terashard.simulate.timeline import Timeline

StageFactory = Callable[[int], StageModule]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did, the same on every rank but for the timeline.

    ``loss`` is the mean over ``tokens``, the target tokens of all ranks; ``gradient_norm`` goes over all parameters, tied
    ones counted once; ``idle_share`` is the part of all ranks' time in which they did not compute; ``signals`` are the sums over all ranks of what each passed in; ``timeline`` is this rank's.
    """

    loss: float
    tokens: int
    gradient_norm: float
    idle_share: float
    signals: tuple[float, ...]
    timeline: Timeline


class Pipeline:
    """This rank's part of a pipeline.

    ``stages`` is a function from a stage's index to its module, built on meta or with values, or this rank's module.
    ``loss`` maps the last stage's output of one slice and its targets to a sum over tokens. ``fill`` gives values to
    modules on meta: (global name, full shape, rows) → these rows.
    """

    def __init__(
        self,
        stages: StageFactory | StageModule,
        plan: Plan,
        mesh: Mesh,
        *,
        loss: Loss | None = None,
        precision: Precision | None = None,
        fill: Fill | None = None,
    ) -> None:
        self.plan, self.mesh = plan, mesh
        self.loss: Loss = loss or CrossEntropy()
        self.precision = precision or Precision()
        self._require_mesh()
        index = mesh.coordinates.stage
        module = stages if isinstance(stages, StageModule) else stages(index)
        table = _exchange(module, plan, mesh)
        self._ties = table.ties(index)
        self.units = make_units(
            module.units(), mesh=mesh, precision=self.precision, ties=self._ties
        )
        if fill is not None:
            self.fill(fill)
        require_written(self.units)
        units = table.units(plan)
        self.schedule = plan.schedule(units)
        self.evaluation = plan.evaluation(units)
        device, dtype = mesh.device, self.precision.compute
        self._stage = Stage(module, index, loss=self.loss, device=device, dtype=dtype)
        self._worker = Worker(mesh, {index: self._stage}, {index: self.units})

    def step(self, tokens: Tensor, targets: Tensor, *, signals: Sequence[float] = ()) -> StepResult:
        """Forward and backward on ``tokens`` and ``targets`` [S, N]; gradients are in ``.grad`` of ``parameters()``.

        All ranks of one data-parallel rank pass the same. Every rank passes equally many ``signals``, which travel in the
        reduction that the loss needs anyway.
        """
        count, timeline = self._run(self.schedule, tokens, targets)
        norm = squared_norm(self.units, count_ties=self._stage.index == 0)
        if self.mesh.coordinates.replica > 0:
            norm.zero_()
        times = timeline.busy(self._stage.index), timeline.seconds
        loss, square, busy, seconds, *summed = self._sum(
            [self._stage.loss_sum, norm, *times, *signals]
        )
        return StepResult(
            loss=loss,
            tokens=count,
            gradient_norm=square**0.5,
            idle_share=1.0 - busy / seconds,
            signals=tuple(summed),
            timeline=timeline,
        )

    def evaluate(self, tokens: Tensor, targets: Tensor) -> tuple[float, int]:
        """Mean loss and number of target tokens of ``tokens`` and ``targets`` [S, N] over all ranks; no gradients."""
        count, _ = self._run(self.evaluation, tokens, targets)
        (loss,) = self._sum([self._stage.loss_sum])
        return loss, count

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters: DTensors, sharded on dim 0."""
        return iter(self.state_dict().values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Global names and parameters of this rank's stage."""
        return iter(self.state_dict().items())

    def state_dict(self) -> dict[str, nn.Parameter]:
        """Global name → DTensor of every parameter of this rank's stage; names do not depend on the plan."""
        return named_parameters(self.units)

    @property
    def ties(self) -> Mapping[str, str]:
        """Parameters of this stage that always equal a parameter of another stage: here → there."""
        return self._ties

    def canonical(self, name: str) -> str:
        """The name of a parameter on the first stage that has it: a tied weight has one name."""
        return self._ties.get(name, name) if self._stage.index else name

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients, to clip them by their norm."""
        scale_gradients(self.units, factor)

    def fill(self, fill: Fill) -> None:
        """Write every parameter of this rank: ``fill`` maps (global name, full shape, rows) to these rows."""
        for unit in self.units:
            materialise(unit, fill)

    def require_equal_ties(self) -> None:
        """Raise ``RunError`` if a weight that two stages share is no longer the same on both."""
        if self.mesh.tie is None or not self._ties:
            return
        mine = {
            tuple(sorted((n, self._ties[n]))): p
            for n, p in self.state_dict().items()
            if n in self._ties
        }
        digests = [blake2b(_bytes(mine[key])).hexdigest() for key in sorted(mine)]
        found = self.mesh.tie.gather_bytes(json.dumps(digests).encode())
        if len(set(found)) > 1:
            names = ", ".join(f"{a} and {b}" for a, b in sorted(mine))
            raise RunError(f"{self.mesh}: tied weights are no longer equal: {names}")

    def _require_mesh(self) -> None:
        plan, mesh = self.plan, self.mesh
        if (plan.replicas, plan.stages, plan.shards) != (mesh.replicas, mesh.stages, mesh.shards):
            raise PlanError(
                f"the plan has {plan.replicas} replicas x {plan.stages} stages x {plan.shards} shards, but the mesh has"
                f" {mesh.replicas} x {mesh.stages} x {mesh.shards}; make the mesh from the plan"
            )

    def _run(self, schedule: Schedule, tokens: Tensor, targets: Tensor) -> tuple[int, Timeline]:
        wanted = (self.plan.sequences, self.plan.tokens)
        if tuple(tokens.shape) != wanted or tuple(targets.shape) != wanted:
            raise RunError(
                f"tokens of shape {tuple(tokens.shape)} and targets of shape {tuple(targets.shape)} came; the plan works"
                f" on {wanted}: [sequences, tokens] of one data-parallel rank"
            )
        tokens, targets = tokens.to(self.mesh.device), targets.to(self.mesh.device)
        counted = (
            targets != getattr(self.loss, "ignore_index", None)
            if self._ignores
            else targets == targets
        )
        count = counted.sum()
        self.mesh.data.sum(count).wait()
        total = int(count)
        return total, self._worker.run(schedule, tokens, targets, 1.0 / max(total, 1))

    @property
    def _ignores(self) -> bool:
        return getattr(self.loss, "ignore_index", None) is not None

    def _sum(self, values: Sequence[float | Tensor]) -> list[float]:
        """Sums over all ranks, in one reduction."""
        device = self.mesh.device
        packed = torch.stack(
            [torch.as_tensor(v, dtype=torch.float64, device=device) for v in values]
        )
        self.mesh.world.sum(packed).wait()
        summed: list[float] = packed.tolist()
        return summed


def _bytes(parameter: nn.Parameter) -> bytes:
    local = parameter.to_local()  # type: ignore[operator]  # a DTensor
    raw: bytes = local.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return raw


@dataclass(frozen=True)
class _Table:
    """What every stage says of itself: its width, its units, its parameters' names, its ties."""

    stages: Sequence[Mapping[str, Any]]

    def ties(self, index: int) -> dict[str, str]:
        """Ties of stage ``index`` in both directions: its own, and those of the stage that ties to it."""
        ties = dict(self.stages[index]["ties"])
        names = {name for unit in self.stages[index]["units"] for name in unit["parameters"]}
        for other, stage in enumerate(self.stages):
            for here, there in stage["ties"].items():
                if other != index and there in names:
                    ties[there] = here
        return ties

    def units(self, plan: Plan) -> tuple[tuple[Unit, ...], ...]:
        """The units of every stage as the schedule sees them."""
        sums: tuple[Over, ...] = ("shard", "replica") if plan.replicas > 1 else ("shard",)
        return tuple(
            tuple(
                Unit(
                    unit["name"],
                    (*sums, "tie") if set(unit["parameters"]) & set(self.ties(index)) else sums,
                    head=stage["head"] and unit is stage["units"][-1],
                )
                for unit in stage["units"]
            )
            for index, stage in enumerate(self.stages)
        )


def _exchange(module: StageModule, plan: Plan, mesh: Mesh) -> _Table:
    """Tell all ranks what this stage is, and see that all run the same plan on stages that fit."""
    mine = {
        "plan": asdict(plan),
        "width": module.width,
        "head": module.has_head(),
        "ties": dict(module.ties()),
        "units": [
            {"name": name, "parameters": [f"{name}.{p}" for p, _ in unit.named_parameters()]}
            for name, unit in module.units()
        ],
    }
    said = [json.loads(s) for s in mesh.world.gather_bytes(json.dumps(mine).encode())]
    table = _Table([said[rank] for rank in mesh.down.ranks])
    for rank, other in enumerate(said):
        if other["plan"] != said[0]["plan"] or other["width"] != said[0]["width"]:
            raise PlanError(
                f"rank {rank} runs another plan or width than rank 0; start every rank from the same run file"
            )
    for index, stage in enumerate(table.stages):
        if stage["ties"] and index != mesh.stages - 1:
            raise PlanError(
                f"stage {index} ties {list(stage['ties'])}; only the last stage can tie, to the first"
            )
        if stage["head"] and index != mesh.stages - 1:
            raise PlanError(f"stage {index} has a head, but only the last stage computes the loss")
    return table
