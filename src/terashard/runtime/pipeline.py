"""The public face of the runtime: a pipeline of stages, for a training loop of one's own.

::

    pipeline = Pipeline(stages, plan, mesh, loss=loss)
    optimizer = torch.optim.AdamW(pipeline.parameters(), fused=True)
    for tokens, targets in batches:          # [S, N]: the sequences of this data-parallel rank
        result = pipeline.step(tokens, targets)
        optimizer.step()

One step runs the plan's schedule: every parameter is gathered once, every gradient summed once. The
gradient is that of the sum of the loss over all target tokens of all ranks, divided by their
number, so that neither slices nor micro-batches nor ranks change it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from terashard.comm.mesh import Mesh
from terashard.errors import PlanError, RunError, ScheduleError
from terashard.nn.loss import CrossEntropy, Loss
from terashard.nn.protocols import StageModule
from terashard.plan.plan import Plan
from terashard.runtime.agree import require_equal_ties, require_equal_values, whole_digests
from terashard.runtime.modules import StageFactory, evaluating, module_of, stashes_of
from terashard.runtime.stage import ScaledLoss, Stage
from terashard.runtime.table import exchange
from terashard.runtime.worker import Worker
from terashard.schedule.check import check
from terashard.schedule.schedule import Schedule
from terashard.schedule.traffic import PlannedTraffic, planned_traffic
from terashard.shard.axes import shared_axes
from terashard.shard.clip import scale_gradients, squared_norm
from terashard.shard.cut import copied_parameters, make_units, named_parameters
from terashard.shard.materialise import Fill, materialise, require_written
from terashard.shard.places import Places
from terashard.shard.precision import Precision
from terashard.shard.residence import Traffic
from terashard.simulate.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did, the same on every rank but for the timeline."""

    loss: float
    """Mean over the target tokens of all ranks."""
    tokens: int
    """Target tokens of all ranks."""
    gradient_norm: float
    """Over all parameters, tied ones counted once, before any clipping."""
    idle_share: float
    """Part of its time in which a rank did not compute, the mean of all ranks."""
    signals: tuple[float, ...]
    """Sums over all ranks of what each passed in."""
    timeline: Timeline
    """This rank's spans."""


class Pipeline:
    """This rank's part of a pipeline.

    ``stages`` is a function from a stage's index to its module, built on meta or with values, or
    this rank's module. ``loss`` maps the last stage's output of one slice and its targets to a sum
    over tokens; tokens whose target is its ``ignore_index``, if it has one, are not counted.
    ``fill`` gives values to modules on meta: (global name, full shape, rows) → these rows. Raises
    ``PlanError`` on all ranks if their plans, stages and meshes do not fit together, and
    ``RunError`` on all if what must have the same values on several of them has not.
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
        module = module_of(stages, index)
        table = exchange(module, plan, mesh, self.precision)
        self._ties = table.ties(index)
        whole = whole_digests(module, mesh)
        self._places = Places(mesh.device) if plan.residency is not None else None
        self.units = make_units(
            module.units(),
            mesh=mesh,
            precision=self.precision,
            ties=self._ties,
            each_micro=plan.sums_each_micro,
            stashes=stashes_of(module) if plan.reduce == "stash" else None,
            places=self._places,
        )
        if fill is not None:
            self.fill(fill)
        require_written(self.units)
        require_equal_values(self.units, whole, self._ties, mesh)
        units = table.units(plan)
        sizes = table.sizes(self.precision.compute.itemsize)
        self._schedule = plan.schedule(units, sizes)
        self._evaluation = plan.evaluation(units, sizes)
        pool = None if self._places is None else self._places.pool
        dtype = self.precision.compute
        self._stage = Stage(module, index, device=mesh.device, dtype=dtype, pool=pool)
        self._worker = Worker(mesh, {index: self._stage}, {index: self.units}, self._places)

    @property
    def schedule(self) -> Schedule:
        """What ``step`` performs."""
        return self._schedule

    def use_schedule(self, schedule: Schedule) -> None:
        """Let ``step`` perform ``schedule``, of the same grid and units, from now on.

        Call it on all ranks. Raises ``ScheduleError`` if ``schedule`` fails ``check``, is of
        another grid or other units, or is not the same on all ranks.
        """
        digests = self.mesh.world.gather_bytes(blake2b(schedule.text().encode()).digest())
        if len(set(digests)) > 1:
            raise ScheduleError("the schedule is not the same on all ranks; give all the same")
        mine = self._schedule
        if (schedule.grid, schedule.units, schedule.training) != (mine.grid, mine.units, True):
            raise ScheduleError(
                "the schedule is of another grid, of other units, or forward only; make it from"
                " this pipeline's own: schedule.with_actions(…)"
            )
        check(schedule)
        self._schedule = schedule

    def step(self, tokens: Tensor, targets: Tensor, *, signals: Sequence[float] = ()) -> StepResult:
        """Forward and backward on ``tokens`` and ``targets`` [S, N].

        Gradients are in ``.grad`` of ``parameters()``. All ranks of one data-parallel rank pass the
        same sequences. Every rank passes equally many ``signals``, which travel in the reduction
        that the loss needs anyway. After a step that failed, on a mesh of several ranks, no other
        can run: a message of it could be taken for one of the next.
        """
        count, timeline = self._run(self._schedule, tokens, targets, self.loss)
        norm = squared_norm(self.units, count_ties=self._stage.index == 0)
        if self.mesh.coordinates.replica > 0:
            norm.zero_()
        loss, tokens_of_all, square, idle, *summed = self._sum(
            [self._stage.loss_sum, count, norm, timeline.idle_share(), *signals]
        )
        return StepResult(
            loss=loss,
            tokens=int(tokens_of_all),
            gradient_norm=square**0.5,
            idle_share=idle / self.mesh.world.size,
            signals=tuple(summed),
            timeline=timeline,
        )

    def evaluate(
        self, tokens: Tensor, targets: Tensor, *, loss: Loss | None = None
    ) -> tuple[float, int]:
        """Mean loss and number of target tokens of ``tokens`` and ``targets`` [S, N].

        Both over all ranks, under ``loss``, by default that of training. Modules are in evaluation
        mode meanwhile. No gradients are made or touched.
        """
        with evaluating(self.units):
            count, _ = self._run(self._evaluation, tokens, targets, loss or self.loss)
        mean, tokens_of_all = self._sum([self._stage.loss_sum, count])
        return mean, int(tokens_of_all)

    @property
    def planned_traffic(self) -> PlannedTraffic:
        """What a step of this rank asks of its groups, counted from the schedule."""
        return planned_traffic(
            self._schedule,
            self.mesh.coordinates.stage,
            {unit.name: unit.elements for unit in self.units},
            among=shared_axes(self.mesh),
            compute=self.precision.compute.itemsize,
            master=self.precision.master.itemsize,
        )

    def traffic(self) -> Traffic:
        """What this rank has asked other ranks for since the pipeline was made."""
        return sum((unit.traffic for unit in self.units), Traffic())

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters: DTensors, sharded on dim 0."""
        return iter(named_parameters(self.units).values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Global names and parameters of this rank's stage."""
        return iter(named_parameters(self.units).items())

    def state_dict(self) -> dict[str, DTensor]:
        """Global name → a detached copy of a parameter of this rank's stage, a DTensor.

        Every copy has storage of its own, so it can be copied again and saved with ``torch.save``,
        and later steps do not change it. Names do not depend on the plan. To change a parameter,
        take it from ``named_parameters``.
        """
        return copied_parameters(self.units)

    @property
    def ties(self) -> Mapping[str, str]:
        """Parameters here that always equal one of another stage: here → there."""
        return self._ties

    def canonical(self, name: str) -> str:
        """The name of a parameter on the first stage that has it: a tied weight has one name."""
        return self._ties.get(name, name) if self._stage.index else name

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients, to clip them by their norm."""
        scale_gradients(self.units, factor)

    def fill(self, fill: Fill) -> None:
        """Write every parameter of this rank: (global name, full shape, rows) → these rows."""
        for unit in self.units:
            materialise(unit, fill)

    def require_equal_ties(self) -> None:
        """Raise ``RunError`` if a weight that two stages share is no longer the same on both."""
        require_equal_ties(self.units, self._ties, self.mesh)

    def _require_mesh(self) -> None:
        plan, mesh = self.plan, self.mesh
        if (plan.replicas, plan.stages, plan.shards) != (mesh.replicas, mesh.stages, mesh.shards):
            raise PlanError(
                f"the plan has {plan.replicas} replicas x {plan.stages} stages x {plan.shards}"
                f" shards, but the mesh has {mesh.replicas} x {mesh.stages} x {mesh.shards};"
                " make the mesh from the plan"
            )

    def _run(
        self, schedule: Schedule, tokens: Tensor, targets: Tensor, loss: Loss
    ) -> tuple[Tensor, Timeline]:
        """Perform ``schedule``; the 0-dim count is this rank's part of a sum over all ranks."""
        wanted = (self.plan.sequences, self.plan.tokens)
        if tuple(tokens.shape) != wanted or tuple(targets.shape) != wanted:
            raise RunError(
                f"tokens of shape {tuple(tokens.shape)} and targets of shape"
                f" {tuple(targets.shape)} came; the plan works on {wanted}: [sequences, tokens] of"
                " one data-parallel rank"
            )
        tokens, targets = tokens.to(self.mesh.device), targets.to(self.mesh.device)
        total = self._count(targets, loss)
        scaled = ScaledLoss(loss, 1.0 / total.clamp(min=1.0))
        timeline = self._worker.run(schedule, tokens, targets, scaled)
        return total if self.mesh.rank == 0 else torch.zeros_like(total), timeline

    def _count(self, targets: Tensor, loss: Loss) -> Tensor:
        """Target tokens of all data-parallel ranks, 0-dim; read here, a GPU would be waited for."""
        ignored = getattr(loss, "ignore_index", None)
        kept = targets.numel() if ignored is None else (targets != ignored).sum()
        count = torch.as_tensor(kept, dtype=torch.float64, device=self.mesh.device)
        self.mesh.data.sum(count).wait()
        return count

    def _sum(self, values: Sequence[float | Tensor]) -> list[float]:
        """Sums over all ranks, in one reduction."""
        device, wide = self.mesh.device, torch.float64
        packed = torch.stack([torch.as_tensor(v, dtype=wide, device=device) for v in values])
        self.mesh.world.sum(packed).wait()
        return list(packed.tolist())
