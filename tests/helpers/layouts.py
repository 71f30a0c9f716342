"""Settings of a whole pipeline, few of them that cover every pair, and one step of each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from random import Random
from typing import Any

import torch
from torch import Tensor

from terashard.comm.mesh import Mesh
from terashard.nn.init import Initialiser
from terashard.nn.loss import Loss
from terashard.nn.protocols import StageModule
from terashard.plan.plan import Plan, spread_layers
from terashard.runtime.pipeline import Pipeline
from terashard.schedule.actions import MicroBatch
from terashard.shard.precision import Precision
from terashard.spec.model import ModelSpec
from tests.helpers.models import LAYERS, Batch, Witness, decoder_stages, sample, tiny_spec, witness
from tests.helpers.threads import run_mesh

FLOAT64 = Precision(compute=torch.float64, master=torch.float64)
TOKENS = 8

CUTS: dict[str, tuple[int, ...]] = {
    "whole": (8,),
    "equal": (4, 4),
    "unequal": (3, 1, 4),
    "tokens": (1,) * 8,
}
MIXED = {
    1: (MicroBatch(2, (3, 1, 4)), MicroBatch(1, (8,))),
    3: (MicroBatch(1, (2, 6)), MicroBatch(1, (8,)), MicroBatch(1, (1, 1, 6))),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One model, one layout of ranks, one cut of the step, one kind of targets."""

    family: Any = "llama"
    tied: bool = False
    kv_heads: int = 2
    stages: int = 1
    shards: int = 1
    replicas: int = 1
    order: str = "one_forward_one_backward"
    micros: int = 1
    cut: str = "whole"
    ignored: bool = False
    each: int = 3
    """Sequences of one data-parallel rank."""

    @property
    def spec(self) -> ModelSpec:
        return tiny_spec(self.family, tied=self.tied, kv_heads=self.kv_heads, tokens=TOKENS)

    @property
    def plan(self) -> Plan:
        if self.cut == "mixed":
            partition: tuple[MicroBatch, ...] = MIXED[self.micros]
        else:
            partition = (MicroBatch(self.each // self.micros, CUTS[self.cut]),) * self.micros
        return Plan(
            stages=self.stages,
            shards=self.shards,
            replicas=self.replicas,
            order=self.order,
            partition=partition,
            layers=spread_layers(LAYERS, self.stages),
        )

    @property
    def sequences(self) -> int:
        """Of all data-parallel ranks."""
        return self.each * self.shards * self.replicas

    @property
    def batch(self) -> Batch:
        return sample(self.sequences, TOKENS, ignored=self.ignored)

    @property
    def witness(self) -> Witness:
        return witness(self.spec, self.sequences, ignored=self.ignored)

    def pipeline(self, mesh: Mesh, precision: Precision = FLOAT64) -> Pipeline:
        spec, plan = self.spec, self.plan
        stages, fill = decoder_stages(spec, plan), Initialiser(spec, 0)
        return Pipeline(stages, plan, mesh, precision=precision, fill=fill)

    def __str__(self) -> str:
        words = [self.family, "tied" if self.tied else "untied", f"kv{self.kv_heads}"]
        words += [f"{self.stages}x{self.shards}x{self.replicas}", self.order]
        words += [f"{self.micros}-{self.cut}", *["ignored"] * self.ignored]
        return "-".join(words)


OPTIONS: dict[str, tuple[Any, ...]] = {
    "family": ("llama", "gpt2"),
    "tied": (False, True),
    "kv_heads": (2, 4),
    "stages": (1, 2, 4),
    "shards": (1, 2),
    "replicas": (1, 2),
    "order": ("fill_drain", "one_forward_one_backward"),
    "micros": (1, 3),
    "cut": (*CUTS, "mixed"),
    "ignored": (False, True),
}


def pairwise_cover(options: Mapping[str, Sequence[Any]], seed: int) -> list[dict[str, Any]]:
    """Few choices, such that every two values of two options stand together in one of them.

    Greedy: begin with a pair that no choice has yet, then give every other option, in random
    order, the value that makes the most new pairs.
    """
    random = Random(seed)
    due = set(pairs_of(options))
    cover = []
    while due:
        choice = dict(random.choice(sorted(due)))
        rest = [name for name in options if name not in choice]
        for name in random.sample(rest, len(rest)):
            gains = [_gain(due, choice, name, value) for value in range(len(options[name]))]
            best = [value for value, gain in enumerate(gains) if gain == max(gains)]
            choice[name] = random.choice(best)
        due -= set(combinations(sorted(choice.items()), 2))
        cover.append({name: options[name][value] for name, value in choice.items()})
    return cover


Pair = tuple[tuple[str, int], tuple[str, int]]
"""Two options, each with the position of a value."""


def pairs_of(options: Mapping[str, Sequence[Any]]) -> Iterator[Pair]:
    """Every two values of two options."""
    places = [[(name, value) for value in range(len(options[name]))] for name in sorted(options)]
    for one, other in combinations(places, 2):
        yield from ((a, b) for a in one for b in other)


def _gain(due: set[Pair], choice: Mapping[str, int], name: str, value: int) -> int:
    new = ((name, value), *choice.items())
    return sum(tuple(sorted((new[0], old))) in due for old in new[1:])


@dataclass(frozen=True)
class RankOutcome:
    """What one rank has after a step; can travel between processes."""

    place: tuple[int, int, int]  # replica, stage, shard
    loss: float
    tokens: int
    norm: float
    rows: dict[str, Tensor]


def step_once(pipeline: Pipeline, batch: Batch) -> RankOutcome:
    """One step on this rank's part of ``batch``."""
    mesh, at = pipeline.mesh, pipeline.mesh.coordinates
    result = pipeline.step(*batch.part(mesh.data.rank, mesh.data.size))
    return RankOutcome(
        (at.replica, at.stage, at.shard),
        result.loss,
        result.tokens,
        result.gradient_norm,
        gradient_rows(pipeline),
    )


def outcome(pipeline: Pipeline, batch: Batch) -> RankOutcome:
    """Evaluate, step, and step again: the same loss, and bitwise the same gradients."""
    mesh = pipeline.mesh
    evaluated, tokens = pipeline.evaluate(*batch.part(mesh.data.rank, mesh.data.size))
    first, again = step_once(pipeline, batch), step_once(pipeline, batch)
    assert abs(evaluated - first.loss) <= 1e-12 * abs(first.loss)
    assert tokens == first.tokens
    assert (again.loss, again.norm) == (first.loss, first.norm)
    for name, value in again.rows.items():
        assert torch.equal(value, first.rows[name]), f"{name} differs in the second step"
    return first


def gradient_rows(pipeline: Pipeline) -> dict[str, Tensor]:
    """This rank's rows of every gradient, by global name."""
    return {
        name: p.grad.to_local().clone()
        for name, p in pipeline.named_parameters()
        if p.grad is not None
    }


@dataclass(frozen=True)
class Whole:
    """What all ranks have together."""

    ranks: Sequence[RankOutcome]
    gradients: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, ranks: Sequence[RankOutcome]) -> "Whole":
        """Put rows together; replicas must agree bitwise."""
        rows: dict[str, dict[int, Tensor]] = {}
        for rank in sorted(ranks, key=lambda rank: rank.place):
            for name, value in rank.rows.items():
                first = rows.setdefault(name, {}).setdefault(rank.place[2], value)
                assert torch.equal(first, value), f"{name} differs between replicas"
        return cls(ranks, {name: torch.cat([*parts.values()]) for name, parts in rows.items()})

    def require(self, wanted: Witness, within: float = 1e-10) -> None:
        """Loss, evaluation, norm and gradients are those of ``wanted`` on every rank."""
        for rank in self.ranks:
            assert rank.tokens == wanted.tokens
            assert abs(rank.loss - wanted.loss) <= within * abs(wanted.loss)
            assert abs(rank.norm - wanted.norm) <= within * wanted.norm
        assert wanted.error(self.gradients) <= within


def step_on_threads(
    plan: Plan, stages: Callable[[int], StageModule], loss: Loss | None, batch: Batch
) -> Whole:
    """One step, in float64, of a model built with values, each rank a thread."""

    def rank(mesh: Mesh) -> RankOutcome:
        return outcome(Pipeline(stages, plan, mesh, loss=loss, precision=FLOAT64), batch)

    return Whole.of(run_plan(plan, rank))


def run_setting(setting: Setting) -> Whole:
    """One step of a decoder, in float64, each rank a thread."""
    ranks = run_plan(setting.plan, lambda mesh: outcome(setting.pipeline(mesh), setting.batch))
    return Whole.of(ranks)


def run_plan(plan: Plan, function: Callable[[Mesh], Any]) -> list[Any]:
    """``function(mesh)`` on every rank of ``plan``, each a thread."""
    return run_mesh(function, replicas=plan.replicas, shards=plan.shards, stages=plan.stages)
