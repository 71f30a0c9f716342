"""The frozen answer to "how is this run cut": stages, shards, replicas, order, slices, layers.

A plan is what the configuration states. It is checked when it is made, saved into the run
directory, and read back from there.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from terashard.config.schema import BatchConfig, ParallelConfig, RunConfig
from terashard.errors import PlanError
from terashard.files import replace_text
from terashard.plan.lowered import lowered
from terashard.plan.partition import partition_of
from terashard.schedule.actions import OVERS, Grid, MicroBatch, Over
from terashard.schedule.budget import Budget
from terashard.schedule.orders import ORDERS, forward_only
from terashard.schedule.schedule import Schedule, Unit
from terashard.spec.model import ModelSpec

FORMAT = "terashard-plan"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one step is cut.

    ``partition`` lists the micro-batches of one data-parallel rank, all of sequences of the same
    length; ``layers`` has the half-open range of layers of every stage, and is empty for stages
    that the caller builds.
    """

    stages: int = 1
    shards: int = 1
    replicas: int = 1
    order: str = "one_forward_one_backward"
    partition: tuple[MicroBatch, ...]
    layers: tuple[tuple[int, int], ...] = ()
    residency: int | None = None
    """Bytes of full parameters that a rank may hold at once; None: its whole stage."""
    reduce: str = "step"
    """What gradients wait in for their sum over the shards: full ones, for one "step" or for one
    "micro_batch"; or a "stash" of what the weights' gradients are computed from, once."""

    def __post_init__(self) -> None:
        """Check that the parts fit together."""
        for name in ("stages", "shards", "replicas"):
            if getattr(self, name) < 1:
                raise PlanError(
                    f"a plan with {getattr(self, name)} {name} runs nothing; give at least 1"
                )
        if self.order not in ORDERS:
            raise PlanError(f"there is no order {self.order!r}; there are: {', '.join(ORDERS)}")
        if not self.partition:
            raise PlanError("a plan without micro-batches runs nothing; give at least one")
        if len({micro.tokens for micro in self.partition}) > 1:
            found = [list(micro.slices) for micro in self.partition]
            raise PlanError(
                f"the slices of every micro-batch must add up to one sequence length; found {found}"
            )
        if self.residency is not None and self.residency < 1:
            raise PlanError(
                f"a residency of {self.residency} bytes holds nothing; give a positive number, or"
                " none to hold the whole stage"
            )
        if self.reduce not in ("step", "micro_batch", "stash"):
            raise PlanError(
                f"there is no way {self.reduce!r} to sum gradients; there are: step, micro_batch,"
                " stash"
            )
        if self.layers:
            self._check_layers()

    def _check_layers(self) -> None:
        if len(self.layers) != self.stages:
            raise PlanError(
                f"layers are given for {len(self.layers)} stages, but there are {self.stages};"
                " give one range per stage"
            )
        starts = (0, *(end for _, end in self.layers[:-1]))
        if any(
            first != at or last <= first
            for at, (first, last) in zip(starts, self.layers, strict=True)
        ):
            found = [list(ends) for ends in self.layers]
            raise PlanError(
                f"stages have the layers {found}; every stage needs at least one layer, and must"
                " begin where the stage before ends, the first at 0"
            )

    @classmethod
    def uniform(
        cls, *, sequences: int, tokens: int, micro_batches: int = 1, slices: int = 1, **rest: Any
    ) -> "Plan":
        """A plan with equal micro-batches of ``sequences`` in all, each cut into equal slices."""
        batch = BatchConfig(sequences=sequences, tokens=tokens)
        parallel = ParallelConfig(micro_batches=micro_batches, slices=(slices,))
        return cls(partition=partition_of(parallel, batch, sequences), **rest)

    @property
    def processes(self) -> int:
        """Ranks that the plan needs."""
        return self.stages * self.shards * self.replicas

    @property
    def sequences(self) -> int:
        """Sequences of one data-parallel rank per step."""
        return sum(micro.sequences for micro in self.partition)

    @property
    def tokens(self) -> int:
        """Tokens of one sequence."""
        return self.partition[0].tokens

    @property
    def sums_each_micro(self) -> bool:
        """Whether gradients are summed over shards after every micro-batch; one has no such sum."""
        return self.reduce == "micro_batch" and self.shards > 1

    @property
    def grid(self) -> Grid:
        """Stages, micro-batches and slices."""
        return Grid(ranks=self.stages, partition=self.partition)

    def schedule(
        self, units: Sequence[Sequence[Unit]] = (), sizes: Mapping[str, int] | None = None
    ) -> Schedule:
        """The checked list of actions of a training step, with sharding if ``units`` are given.

        ``units`` lists those of every stage, ``sizes`` the bytes of each when it is full; a plan
        with a residency needs both. For a transport whose sends block, put the schedule
        through ``lower.fuse_pairs``.
        """
        shares = self.shards * self.replicas > 1
        return lowered(
            ORDERS[self.order](self.grid), units, budget=self._budget(sizes), early_sums=shares
        )

    def evaluation(
        self, units: Sequence[Sequence[Unit]] = (), sizes: Mapping[str, int] | None = None
    ) -> Schedule:
        """The checked list of actions that computes the loss and nothing else."""
        return lowered(forward_only(self.grid), units, budget=self._budget(sizes))

    def _budget(self, sizes: Mapping[str, int] | None) -> Budget | None:
        if self.residency is None or sizes is None:
            return None
        return Budget(self.residency, sizes)

    def reductions(self, *, trains: bool, tied: bool) -> tuple[Over, ...]:
        """The sums of the gradient of a unit; ``tied``: another stage has one of its weights."""
        if not trains:
            return ()
        wanted: dict[Over, bool] = {"shard": True, "replica": self.replicas > 1, "tie": tied}
        return tuple(over for over in OVERS if wanted[over])

    def save(self, path: Path) -> None:
        """Write the plan as JSON."""
        found = {"format": FORMAT, "version": VERSION, **asdict(self)}
        replace_text(path, json.dumps(found, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Plan":
        """Read a plan that ``save`` wrote; ``PlanError`` says what is wrong with the file."""
        try:
            found = json.loads(path.read_text())
            if found.pop("format") != FORMAT or found.pop("version") != VERSION:
                raise ValueError(f"its format is not {FORMAT!r} version {VERSION}")
            return _from_json(found)
        except OSError as cause:
            raise PlanError(f"cannot read the plan {path}: {cause.strerror or cause}") from cause
        except (ValueError, KeyError, TypeError, AttributeError) as cause:
            raise PlanError(f"{path} is no plan that can be read: {cause}") from cause


def _from_json(found: dict[str, Any]) -> Plan:
    """The plan whose ``asdict`` is ``found``."""
    micros = tuple(MicroBatch(m["sequences"], tuple(m["slices"])) for m in found["partition"])
    layers = tuple((first, last) for first, last in found["layers"])
    return Plan(**(found | {"partition": micros, "layers": layers}))


def plan_of(config: RunConfig, num_layers: int) -> Plan:
    """What ``config`` states, checked: layers spread over stages, sequences over their ranks."""
    parallel, batch = config.parallel, config.batch
    ranks = parallel.shards * parallel.replicas
    if batch.sequences % ranks:
        raise PlanError(
            f"batch.sequences = {batch.sequences} cannot be shared by {ranks} data-parallel ranks"
            f" (shards x replicas = {parallel.shards} x {parallel.replicas}); make it a multiple of"
            f" {ranks}"
        )
    return Plan(
        stages=parallel.stages,
        shards=parallel.shards,
        replicas=parallel.replicas,
        order=parallel.order,
        partition=partition_of(parallel, batch, batch.sequences // ranks),
        layers=spread_layers(num_layers, parallel.stages),
        residency=parallel.residency,
        reduce=parallel.reduce,
    )


def spread_layers(num_layers: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Half-open layer ranges of every stage, as even as can be; the first stages get the rest."""
    if stages > num_layers:
        raise PlanError(
            f"parallel.stages = {stages} is more than the model's {num_layers} layers;"
            f" use at most {num_layers} stages, or a deeper model"
        )
    each, rest = divmod(num_layers, stages)
    ends = [each * (s + 1) + min(s + 1, rest) for s in range(stages)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def stage_units(spec: ModelSpec, plan: Plan) -> tuple[tuple[Unit, ...], ...]:
    """The units of every stage of terashard's own decoder."""
    if not plan.layers or plan.layers[-1][1] != spec.num_layers:
        raise PlanError(
            f"the plan spreads {plan.layers[-1][1] if plan.layers else 0} layers over its stages,"
            f" but the model has {spec.num_layers}; make the plan for this model"
        )
    names = spec.unit_names()
    sums = plan.reductions(trains=True, tied=False)
    ties = plan.reductions(trains=True, tied=spec.tied and plan.stages > 1)
    each = plan.sums_each_micro
    stages = [
        [Unit(f"layers.{i}", sums, each_micro=each) for i in range(*layers)]
        for layers in plan.layers
    ]
    stages[0].insert(0, Unit(names[0], ties, each_micro=each))
    lenders = (names[0],) if spec.tied and plan.stages == 1 else ()
    stages[-1].append(Unit(names[-1], ties, head=True, borrows=lenders, each_micro=each))
    return tuple(map(tuple, stages))


def unit_sizes(spec: ModelSpec, itemsize: int, *, stages: int) -> dict[str, int]:
    """Bytes of every unit of terashard's own decoder when it is full.

    A tied weight is the embedding's; where the head is on another stage, it has a copy.
    """
    sizes = {
        unit: itemsize * sum(prod(shape) for shape in spec.unit_parameters(unit).values())
        for unit in spec.unit_names()
    }
    if spec.tied and stages > 1:
        sizes["head"] += itemsize * prod(spec.unit_parameters("embed")["embed.tokens.weight"])
    return sizes
