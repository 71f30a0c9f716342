"""``terashard schedule``: shows who computes what and when; checks a schedule written as text."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from terashard.cli.arguments import RunFile
from terashard.config.schema import RunConfig
from terashard.errors import ConfigError, ScheduleError
from terashard.units import show_count

if TYPE_CHECKING:  # numpy and rich come with these; --help does without
    from rich.console import Console

    from terashard.plan.plan import Plan
    from terashard.schedule.draw import Picture
    from terashard.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Show(RunFile):
    """Draw one training step of a run: what every pipeline rank computes, and when."""

    list: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the list of actions instead, with transfers and sharding, as `check` reads it."""
    width: Annotated[int | None, tyro.conf.arg(metavar="LETTERS", help_behavior_hint="")] = None
    """Width of the picture; by default that of the terminal, or 100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Check a schedule written as text: complete, in order, resident, delivered, ending."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """A schedule, as `terashard schedule show --list` prints it."""
    sends: Annotated[Literal["buffered", "blocking"], tyro.conf.arg(help_behavior_hint="")] = (
        "buffered"
    )
    """blocking: a send returns only when its receiver is there; buffered: at once."""


def run(arguments: Show | Check) -> int:
    """Perform the verb; returns the exit code."""
    return _show(arguments) if isinstance(arguments, Show) else _check(arguments)


def _show(arguments: Show) -> int:
    from rich.console import Console
    from rich.text import Text

    from terashard.plan.plan import plan_of
    from terashard.schedule.draw import Scale, draw

    config = arguments.load("schedule show")
    plan = plan_of(config, config.model.num_layers)
    schedule = _schedule(config, plan)
    if arguments.list:
        print(schedule.text(), end="")
        return 0
    console = Console(highlight=False)
    picture = draw(schedule, Scale(width=arguments.width or _width(console)))
    console.print(Text(title(plan), style="bold"))
    console.print(Text(f"{cut(plan)}\n"), soft_wrap=True)
    console.print(picture, soft_wrap=True)
    console.print(f"\n{picture.steps:.3g} steps; ranks compute {picture.busy:.0%} of the time.")
    if plan.shards > 1:
        console.print(sharding(schedule), soft_wrap=True)
    console.print(_LEGEND, soft_wrap=True)
    return 0


_LEGEND = "F is a forward cell, B a backward one, with micro-batch and slice; dots are idle."


def picture_of(config: RunConfig, plan: "Plan", console: "Console") -> "Picture":
    """The step of a run, as wide as ``console`` is."""
    from terashard.schedule.draw import Scale, draw

    return draw(_schedule(config, plan), Scale(width=_width(console)))


def _width(console: "Console") -> int:
    return console.width if console.is_terminal else 100


def _schedule(config: RunConfig, plan: "Plan") -> "Schedule":
    """The step's schedule; the vocabulary, which only the data knows, plays no part in it."""
    from terashard.plan.plan import stage_units, unit_sizes
    from terashard.spec.model import describe

    size, tokens = config.model.vocab_size or 1, config.batch.tokens
    spec = describe(config.model, vocab_size=size, max_length=tokens)
    itemsize = {"bf16": 2, "fp32": 4, "fp64": 8}[config.train.precision]
    return plan.schedule(stage_units(spec, plan), unit_sizes(spec, itemsize, stages=plan.stages))


def title(plan: "Plan") -> str:
    """Order and ranks of a plan, in one line."""
    return (
        f"{plan.order}: {show_count(plan.stages, 'stage')}"
        f" x {show_count(plan.shards, 'shard')} x {show_count(plan.replicas, 'replica')}"
    )


def sharding(schedule: "Schedule") -> str:
    """How often units are gathered and summed in a step, by rank."""
    from terashard.schedule.actions import Gather, Reduce

    told = []
    for rank, actions in enumerate(schedule):
        gathers = sum(isinstance(action, Gather) for action in actions)
        sums = sum(isinstance(action, Reduce) for action in actions)
        told.append(f"rank {rank} {show_count(gathers, 'gather')}, {show_count(sums, 'reduction')}")
    return f"per step: {'; '.join(told)}"


def cut(plan: "Plan") -> str:
    """How a data-parallel rank's sequences are cut, equal micro-batches counted together."""
    parts = []
    for micro in dict.fromkeys(plan.partition):
        times = plan.partition.count(micro)
        lengths = " + ".join(map(str, micro.slices))
        parts.append(
            f"{show_count(times, 'micro-batch')} of {show_count(micro.sequences, 'sequence')}"
            f" in {show_count(len(micro.slices), 'slice')} ({lengths} tokens)"
        )
    return "; ".join(parts)


def _check(arguments: Check) -> int:
    from terashard.schedule.check import check
    from terashard.schedule.text import parse

    try:
        text = arguments.file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        why = cause.strerror if isinstance(cause, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the schedule {arguments.file}: {why}") from cause
    try:
        schedule = parse(text)
        check(schedule, sends=arguments.sends)
    except ScheduleError as cause:
        raise ScheduleError(f"{arguments.file}: {cause}") from cause
    grid = schedule.grid
    cells = grid.num_stages * sum(grid.num_slices)
    print(
        f"{arguments.file} is right: {len(schedule)} actions on {show_count(grid.ranks, 'rank')},"
        f" {show_count(cells, 'cell')}, {arguments.sends} sends"
    )
    return 0
