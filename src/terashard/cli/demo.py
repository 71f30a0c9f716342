"""``terashard demo``: the main job on real text, on this machine, in two minutes."""

import shlex
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from terashard.cli.schedule import cut, picture_of, title
from terashard.config.load import load
from terashard.config.override import read_overrides
from terashard.config.schema import RunConfig, TrainConfig
from terashard.errors import ConfigError
from terashard.report.curve import curve
from terashard.train.directory import RunDirectory
from terashard.train.record import read_records

if TYPE_CHECKING:  # numpy and rich come with these; --help does without
    from rich.console import Console

    from terashard.data.baseline import Baseline
    from terashard.data.tokens import TokenInfo
    from terashard.plan.plan import Plan

HELD_OUT = 0.05
OURS = ("data.train", "data.validation", "run.directory")
"""What the demo decides, all of it inside ``--directory``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Train a small model on the Python standard library's own sources. Downloads nothing.

    Two processes, a pipeline of two stages, token slices; about two minutes on two cores.
    """

    directory: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """New folder for tokens and run; by default runs/demo-<date>-<time>."""
    overrides: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()


def run(arguments: Demo) -> int:
    """Prepare, show the plan, train, and say what came out."""
    from rich.console import Console

    from terashard.plan.plan import plan_of

    console = Console(highlight=False)
    root = arguments.directory or Path(f"runs/demo-{datetime.now():%Y%m%d-%H%M%S}")
    config = _config(root, arguments.overrides)
    plan = plan_of(config, config.model.num_layers)
    info = _prepare(root, console)
    tables = _tables(root)
    _show_tables(console, tables)
    _show_plan(console, config, plan, info)
    from terashard.train.launch import launch

    code = launch(config, plan.processes)
    return code or _show_result(console, config, tables)


def _config(root: Path, overrides: tuple[str, ...]) -> RunConfig:
    """The preset, with the command line on top, in ``root``."""
    for dotted in read_overrides(overrides).keys() & set(OURS):
        raise ConfigError(
            f"the demo makes its own text and run, so --{dotted} cannot be given; name a folder for"
            " both with --directory, or use terashard train"
        )
    config = load(None, overrides, "demo")
    data = replace(config.data, train=f"{root}/tokens/train", validation=f"{root}/tokens/held-out")
    return replace(config, data=data, run=replace(config.run, directory=f"{root}/run"))


def _prepare(root: Path, console: "Console") -> "TokenInfo":
    from terashard.data.corpus import split_documents, standard_library_sources
    from terashard.data.tokens import prepare

    corpus = standard_library_sources()
    train, held_out = split_documents(corpus, HELD_OUT)
    info = prepare(train, root / "tokens" / "train")
    other = prepare(held_out, root / "tokens" / "held-out")
    _heading(console, "Text", "the Python standard library's own sources, one token per byte")
    console.print(f"  training  {info.documents:>5,} files  {info.tokens:>12,} bytes")
    console.print(f"  held out  {other.documents:>5,} files  {other.tokens:>12,} bytes\n")
    return info


def _tables(root: Path) -> "Baseline":
    from terashard.data.baseline import baseline
    from terashard.data.tokens import TokenFolder

    train, other = (TokenFolder.open(root / "tokens" / name) for name in ("train", "held-out"))
    return baseline(train.tokens, other.tokens, train.vocab_size)


def _show_tables(console: "Console", tables: "Baseline") -> None:
    _heading(console, "To beat", "loss on the held-out files, in nats per byte")
    console.print(f"  {tables.unigram:.3f}  knowing how often each byte occurs (unigram table)")
    console.print(f"  {tables.bigram:.3f}  knowing the byte before as well (bigram table)\n")


def _show_plan(console: "Console", config: RunConfig, plan: "Plan", info: "TokenInfo") -> None:
    from terashard.spec.model import describe

    spec = describe(config.model, vocab_size=info.vocab_size, max_length=config.batch.tokens)
    _heading(console, "Plan", title(plan))
    console.print(
        f"  {spec.num_layers} layers of width {spec.hidden_size},"
        f" {spec.num_parameters():,} parameters; {_layers(plan)}",
        soft_wrap=True,
    )
    console.print(f"  {cut(plan)}\n", soft_wrap=True)
    console.print(picture_of(config, plan, console), soft_wrap=True)
    console.print()
    _heading(
        console,
        "Training",
        f"{config.train.steps} steps, {plan.processes} processes on this machine",
    )


def _layers(plan: "Plan") -> str:
    """Which layers are where, as people count: from 0, both ends included."""
    return ", ".join(f"layers {a}-{b - 1} on stage {s}" for s, (a, b) in enumerate(plan.layers))


def _show_result(console: "Console", config: RunConfig, tables: "Baseline") -> int:
    from rich.text import Text

    run_directory = Path(config.run.directory)
    records = read_records(RunDirectory(run_directory).metrics)
    console.print()
    _heading(console, "Loss", f"nats per byte, steps 1 to {records[-1]['step']}")
    for line in curve([r["loss"] for r in records if isinstance(r["loss"], float)]):
        console.print(line)
    held_out = records[-1]["held_out_loss"]
    console.print()
    if held_out is None:
        console.print(
            f"stopped after step {records[-1]['step']}, before the held-out loss was measured"
        )
    else:
        held_out = float(held_out)  # NaN is a string in JSON
        tables_said = (
            f"{'below' if held_out < value else 'NOT below'} the {name} table ({value:.3f})"
            for name, value in (("bigram", tables.bigram), ("unigram", tables.unigram))
        )
        console.print(
            Text.assemble(
                "held-out loss ",
                (f"{held_out:.3f}", "bold"),
                f" nats per byte, {', '.join(tables_said)}",
            ),
            soft_wrap=True,
        )
    console.print(f"run directory {run_directory}\n", soft_wrap=True)
    _show_next(console, config, finished=held_out is not None)
    return 0


def _twice(train: TrainConfig) -> str:
    """The option that makes the run twice as long."""
    length = next(n for n in ("steps", "tokens", "epochs") if getattr(train, n) is not None)
    return f"--train.{length} {2 * getattr(train, length)}"


def _show_next(console: "Console", config: RunConfig, *, finished: bool) -> None:
    _heading(console, "Next", "")
    resume = f"terashard resume {shlex.quote(config.run.directory)}"
    steps = (
        ("train on, twice as long", f"{resume} {_twice(config.train)}")
        if finished
        else ("finish this run", resume),
        ("prepare text of your own", "terashard data prepare PATH... -o tokens"),
        ("train a run of your own", "terashard train RUN.toml"),
        ("see how a step is cut", "terashard schedule show --preset demo"),
    )
    for what, command in steps:
        console.print(f"  {what:<28}{command}", soft_wrap=True)


def _heading(console: "Console", name: str, rest: str) -> None:
    from rich.text import Text

    console.print(Text.assemble((name, "bold"), f"  {rest}" if rest else ""), soft_wrap=True)
