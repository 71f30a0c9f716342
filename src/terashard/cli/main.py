"""The command ``terashard``: finds the verb, hands it its words, turns errors into one message.

A verb lives in a module of its own, imported when it is called: a frozen dataclass of arguments
(its docstring is the help) and ``run(arguments) -> int``. Nothing here imports torch.

Exit codes: 0 done; 1 failed while running; 2 refused before anything ran (a wrong command line,
configuration, plan or data); 130 interrupted. ``TERASHARD_TRACEBACK=1`` shows where an error came
from.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import terashard
from terashard.config.nearest import closest, did_you_mean
from terashard.errors import ConfigError, DataError, PlanError, TerashardError

SENTENCE = (
    "trains Transformers on long sequences: token slices flow through pipeline stages over"
    " sharded parameters, driven by one schedule held as data."
)
EXAMPLES = (
    "terashard demo",
    "terashard data prepare books/ -o tokens/",
    "terashard train run.toml --parallel.stages 2 --parallel.slices 8",
)
CLOSING = (
    "terashard COMMAND --help says more. Any key of a run file is also an option of train,"
    " resume and show: --section.key value."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One thing the command can do."""

    name: str
    usage: str = ""
    help: str
    module: str
    arguments: str
    """Name of the dataclass in ``module``."""


VERBS = (
    Verb(
        name="demo",
        help="see it work: a small model, two minutes",
        module="terashard.cli.demo",
        arguments="Demo",
    ),
    Verb(
        name="train",
        usage="RUN.toml [-n N]",
        help="train what a run file describes",
        module="terashard.cli.train",
        arguments="Train",
    ),
    Verb(
        name="resume",
        usage="RUN_DIR",
        help="go on from a run's last checkpoint",
        module="terashard.cli.resume",
        arguments="Resume",
    ),
    Verb(
        name="data prepare",
        usage="PATH... -o DIR",
        help="text, sources or JSON lines to tokens",
        module="terashard.cli.data",
        arguments="Prepare",
    ),
    Verb(
        name="config show",
        usage="[RUN.toml] [--diff]",
        help="the whole configuration of a run",
        module="terashard.cli.config",
        arguments="Show",
    ),
    Verb(
        name="schedule show",
        usage="RUN.toml",
        help="who computes what, and when",
        module="terashard.cli.schedule",
        arguments="Show",
    ),
    Verb(
        name="schedule check",
        usage="FILE",
        help="whether a schedule written as text is right",
        module="terashard.cli.schedule",
        arguments="Check",
    ),
    Verb(
        name="version",
        help="what a bug report should begin with",
        module="terashard.cli.version",
        arguments="Version",
    ),
)


def entry() -> None:
    """Run the command line of this process and exit."""
    sys.exit(main(sys.argv[1:]))


def main(words: Sequence[str]) -> int:
    """Perform one command; returns its exit code."""
    try:
        return _perform(list(words))
    except TerashardError as error:
        _complain(error)
        return 2 if isinstance(error, ConfigError | PlanError | DataError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone; the interpreter must not try to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def find(words: Sequence[str]) -> tuple[Verb, list[str]]:
    """The verb that ``words`` begin with, and the words after it; ConfigError names the nearest."""
    for verb in VERBS:
        name = verb.name.split()
        if list(words[: len(name)]) == name:
            return verb, list(words[len(name) :])
    asked = " ".join(word for word in words[:2] if not word.startswith("-"))
    if inside := [verb.name for verb in _group(words[0])]:
        meant = did_you_mean(" or ".join(inside))
        raise ConfigError(f"there is no command {asked!r}; {meant}")
    names = [verb.name for verb in VERBS]
    close = _nearest(words[0]) or _nearest(asked)
    meant = did_you_mean(close, f"there are {', '.join(names)}")
    raise ConfigError(f"there is no command {words[0]!r}; {meant}")


def _nearest(asked: str) -> str | None:
    names = {verb.name: verb.name for verb in VERBS}
    names |= {verb.name.split()[0]: verb.name for verb in VERBS}
    names |= {verb.name.split()[-1]: verb.name for verb in VERBS if "show" not in verb.name}
    close = closest(asked, names)
    return names[close] if close else None


def _perform(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        _print_help()
        return 0
    if words[0] in ("-V", "--version"):
        print(f"terashard {terashard.__version__}")
        return 0
    if (group := _group(words[0])) and words[1:] in (["-h"], ["--help"]):
        _print_verbs(group)
        return 0
    verb, rest = find(words)
    from terashard.cli.arguments import parse  # tyro: only once a verb is known

    module = import_module(verb.module)
    arguments = parse(getattr(module, verb.arguments), rest, f"terashard {verb.name}")
    return int(module.run(arguments))


def _group(word: str) -> list[Verb]:
    """The verbs of two words that begin with ``word``."""
    return [verb for verb in VERBS if verb.name.startswith(f"{word} ")]


def _complain(error: TerashardError) -> None:
    if os.environ.get("TERASHARD_TRACEBACK") == "1":
        traceback.print_exception(error)
    if not sys.stderr.isatty():
        print(f"error: {error}", file=sys.stderr)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 1))
    line.add_row(Text("error:", style="bold red"), Text(str(error)))
    Console(stderr=True).print(line)


def _print_help() -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text.assemble(("terashard", "bold"), f" {SENTENCE}"))
    console.print(Text("\nCommands", style="bold"))
    _print_verbs(VERBS)
    console.print(Text("\nExamples", style="bold"))
    console.print(Text("\n".join(f"  {example}" for example in EXAMPLES)))
    console.print(Text(f"\n{CLOSING}"))


def _print_verbs(verbs: Sequence[Verb]) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for verb in verbs:
        name = Text(f"{verb.name} ", style="bold cyan").append(verb.usage, style="not bold cyan")
        table.add_row(name, Text(verb.help))
    Console(highlight=False).print(Padding(table, (0, 0, 0, 2), expand=False))
