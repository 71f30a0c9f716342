"""What the stages of a pipeline say of themselves, exchanged once, before anything runs.

A rank builds its own stage only. What it must know of the others, their units above all, comes from
here: every rank tells all others, every rank judges all that was said, and so all ranks refuse the
same fault with the same sentence.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from torch import nn

from terashard.comm.mesh import Mesh
from terashard.errors import PlanError
from terashard.nn.protocols import StageModule
from terashard.plan.plan import Plan
from terashard.schedule.schedule import Unit
from terashard.shard.precision import Precision


@dataclass(frozen=True, slots=True)
class StageCard:
    """One stage in words: ``units`` are names, each with its parameters' (shape, trains).

    ``numels`` has the elements of every unit's own parameters: a shared one belongs to the first
    unit that uses it. ``borrows`` has, of every unit that uses others' parameters, their names.
    """

    width: int
    has_head: bool
    ties: Mapping[str, str]
    units: Mapping[str, Mapping[str, tuple[Sequence[int], bool]]]
    numels: Mapping[str, int]
    borrows: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, module: StageModule) -> "StageCard":
        """Describe ``module``."""
        units: dict[str, dict[str, tuple[Sequence[int], bool]]] = {}
        for name, unit in module.units():
            if name in units:
                raise PlanError(f"two units of a stage are called {name}; a name belongs to one")
            units[name] = {
                f"{name}.{p}": (list(parameter.shape), parameter.requires_grad)
                for p, parameter in unit.named_parameters()
            }
        numels, borrows = _belongings(module.units())
        return cls(module.width, module.has_head(), dict(module.ties()), units, numels, borrows)

    @property
    def parameters(self) -> dict[str, tuple[Sequence[int], bool]]:
        """Global name → (shape, trains) of every parameter."""
        return {name: face for unit in self.units.values() for name, face in unit.items()}


@dataclass(frozen=True)
class StageTable:
    """The cards of all stages, in order."""

    stages: Sequence[StageCard]

    def ties(self, index: int) -> dict[str, str]:
        """Ties of stage ``index`` in both directions: parameter here → parameter there."""
        here = self.stages[index]
        ties = dict(here.ties)
        for stage in self.stages:
            back = {there: name for name, there in stage.ties.items()}
            ties |= {there: name for there, name in back.items() if there in here.parameters}
        return ties

    def units(self, plan: Plan) -> tuple[tuple[Unit, ...], ...]:
        """The units of every stage as a schedule sees them."""
        return tuple(tuple(self._units(index, plan)) for index in range(len(self.stages)))

    def sizes(self, itemsize: int) -> dict[str, int]:
        """Bytes of every unit's own parameters when they are full."""
        return {name: n * itemsize for stage in self.stages for name, n in stage.numels.items()}

    def _units(self, index: int, plan: Plan) -> Iterator[Unit]:
        stage, ties = self.stages[index], self.ties(index)
        last = len(stage.units) - 1
        for place, (name, parameters) in enumerate(stage.units.items()):
            trained = {p for p, (_, trains) in parameters.items() if trains}
            reductions = plan.reductions(trains=bool(trained), tied=bool(trained & ties.keys()))
            head, borrows = stage.has_head and place == last, tuple(stage.borrows.get(name, ()))
            each = plan.sums_each_micro and bool(reductions)
            yield Unit(name, reductions, head, borrows, each)


def _belongings(
    units: Sequence[tuple[str, nn.Module]],
) -> tuple[dict[str, int], dict[str, list[str]]]:
    """By unit, the elements of its own parameters; and the units whose parameters it uses too."""
    owners: dict[nn.Parameter, str] = {}
    numels: dict[str, int] = {}
    borrows: dict[str, list[str]] = {}
    for name, unit in units:
        used = list(unit.parameters())
        lenders = {owners.setdefault(parameter, name) for parameter in used} - {name}
        numels[name] = sum(p.numel() for p in used if owners[p] == name)
        if lenders:
            borrows[name] = sorted(lenders)
    return numels, borrows


def exchange(module: StageModule, plan: Plan, mesh: Mesh, precision: Precision) -> StageTable:
    """Tell all ranks what this stage is; ``PlanError`` if the ranks do not fit together."""
    run = {"plan": asdict(plan), "compute": str(precision.compute), "master": str(precision.master)}
    mine = json.dumps({"run": run, "stage": asdict(StageCard.of(module))})
    said = [json.loads(words) for words in mesh.world.gather_bytes(mine.encode())]
    at = [mesh.layout.coordinates(rank).stage for rank in range(len(said))]
    for rank, other in enumerate(said):
        if other["run"] != said[0]["run"]:
            raise PlanError(
                f"rank {rank} runs another plan or precision than rank 0; start every rank from"
                " the same run file"
            )
        first = at.index(at[rank])
        if other["stage"] != said[first]["stage"]:
            raise PlanError(
                f"rank {rank} built stage {at[rank]} otherwise than rank {first}; all shards and"
                " replicas of a stage need the same units, parameters and ties"
            )
    table = StageTable([StageCard(**said[at.index(s)]["stage"]) for s in range(mesh.stages)])
    _check_stages(table.stages)
    _check_names(table.stages)
    _check_ties(table.stages)
    return table


def _check_stages(stages: Sequence[StageCard]) -> None:
    for index, stage in enumerate(stages):
        if stage.width != stages[0].width:
            raise PlanError(
                f"stage {index} is {stage.width} channels wide, stage 0 {stages[0].width}; what"
                " travels from stage to stage has one width"
            )
        if not stage.units:
            raise PlanError(f"stage {index} has no units; every stage needs at least one")
        if stage.has_head and index != len(stages) - 1:
            raise PlanError(f"stage {index} has a head, but only the last stage computes the loss")


def _check_names(stages: Sequence[StageCard]) -> None:
    names = Counter(name for stage in stages for name in (*stage.units, *stage.parameters))
    for name, count in names.items():
        if count > 1:
            raise PlanError(
                f"{count} units or parameters of the pipeline are called {name}; a global name"
                " belongs to one"
            )


def _check_ties(stages: Sequence[StageCard]) -> None:
    for index, stage in enumerate(stages):
        for here, there in stage.ties.items():
            _check_tie(stages, index, here, there)


def _check_tie(stages: Sequence[StageCard], index: int, here: str, there: str) -> None:
    last = len(stages) - 1
    if index != last or last == 0 or there not in stages[0].parameters:
        raise PlanError(
            f"stage {index} ties {here} to {there}; only the last of several stages can tie, and"
            " only to a parameter of the first: inside one stage let both places share it"
        )
    mine, other = stages[last].parameters.get(here), stages[0].parameters[there]
    if mine != other:
        raise PlanError(
            f"{here} is tied to {there}, but they are (shape, trains) {mine} and {other}; tied"
            " parameters have one shape, and both train or neither"
        )
