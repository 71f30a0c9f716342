"""``terashard schedule``: shows who computes what and when; checks a schedule written as text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from terashard.config.load import load, presets
from terashard.config.schema import RunConfig
from terashard.errors import ConfigError, ScheduleError
from terashard.plan.plan import Plan, plan_of, stage_units
from terashard.schedule.check import check
from terashard.schedule.draw import Picture, Scale, draw
from terashard.schedule.progress import Sends
from terashard.schedule.schedule import Schedule
from terashard.schedule.text import parse
from terashard.spec.model import describe


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """Draw one training step of a run: what every pipeline rank computes, and when."""

    file: Annotated[
        Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.toml", help_behavior_hint="")
    ] = None
    """Run file (TOML)."""
    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Named settings below the run file: demo, small or tiny."""
    list: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the list of actions instead, with transfers and sharding, as `check` reads it."""
    width: Annotated[int | None, tyro.conf.arg(metavar="LETTERS", help_behavior_hint="")] = None
    """Width of the picture; by default that of the terminal, or 100."""
    overrides: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Check a schedule written as text: complete, in order, resident, delivered, ending."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """A schedule, as `terashard schedule show --list` prints it."""
    sends: Annotated[Sends, tyro.conf.arg(help_behavior_hint="")] = "buffered"
    """blocking: a send returns only when its receiver is there; buffered: at once."""


def run(arguments: Show | Check) -> int:
    """Perform the verb; returns the exit code."""
    return _show(arguments) if isinstance(arguments, Show) else _check(arguments)


def _show(arguments: Show) -> int:
    if arguments.file is None and arguments.preset is None:
        raise ConfigError(
            "schedule show needs a run file (terashard schedule show RUN.toml) or --preset"
            f" {'|'.join(presets())}"
        )
    config = load(arguments.file, arguments.overrides, arguments.preset)
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
    console.print(_LEGEND, soft_wrap=True)
    return 0


_LEGEND = "F is a forward cell, B a backward one, with micro-batch and slice; dots are idle."


def picture_of(config: RunConfig, plan: Plan, console: Console) -> Picture:
    """The step of a run, as wide as ``console`` is."""
    return draw(_schedule(config, plan), Scale(width=_width(console)))


def _width(console: Console) -> int:
    return console.width if console.is_terminal else 100


def _schedule(config: RunConfig, plan: Plan) -> Schedule:
    """The step's schedule; the vocabulary, which only the data knows, plays no part in it."""
    size, tokens = config.model.vocab_size or 1, config.batch.tokens
    spec = describe(config.model, vocab_size=size, max_length=tokens)
    return plan.schedule(stage_units(spec, plan))


def title(plan: Plan) -> str:
    """Order and ranks of a plan, in one line."""
    return (
        f"{plan.order}: {_count(plan.stages, 'stage')}"
        f" x {_count(plan.shards, 'shard')} x {_count(plan.replicas, 'replica')}"
    )


def cut(plan: Plan) -> str:
    """How a data-parallel rank's sequences are cut, equal micro-batches counted together."""
    parts = []
    for micro in dict.fromkeys(plan.partition):
        times = plan.partition.count(micro)
        lengths = " + ".join(map(str, micro.slices))
        parts.append(
            f"{_count(times, 'micro-batch')} of {_count(micro.sequences, 'sequence')}"
            f" in {_count(len(micro.slices), 'slice')} ({lengths} tokens)"
        )
    return "; ".join(parts)


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def _check(arguments: Check) -> int:
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
        f"{arguments.file} is right: {len(schedule)} actions on {_count(grid.ranks, 'rank')},"
        f" {_count(cells, 'cell')}, {arguments.sends} sends"
    )
    return 0
