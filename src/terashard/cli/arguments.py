"""A verb's words → a frozen dataclass of its arguments, through tyro; a run's overrides stay words.

A verb that takes ``--section.key value`` has a field ``overrides``. The dot tells the two kinds of
options apart: an option with a dot and everything up to the next option go, unread, into that
field, for ``config.load`` to read over the run file.
"""

import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, cast, get_type_hints

import tyro

from terashard.config.load import load, presets
from terashard.config.nearest import closest, did_you_mean
from terashard.config.override import settings_type, unknown_option
from terashard.config.schema import RunConfig
from terashard.errors import ConfigError

Arguments = TypeVar("Arguments")
_OPTION = re.compile(r"--?[A-Za-z].*")
_HELP = {"-h", "--help"}
_FRAME = str.maketrans("│╭╮╰╯─", "     -")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """What names a configuration on the command line: a file, a preset, options over both."""

    file: Annotated[
        Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.toml", help_behavior_hint="")
    ] = None
    """Run file (TOML); without it, the defaults and the preset."""
    preset: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="NAME",
            help_behavior_hint="",
            help=f"Named settings below the run file: {', '.join(presets())}.",
        ),
    ] = None
    overrides: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()

    def load(self, verb: str) -> RunConfig:
        """The configuration; ``ConfigError`` in the name of ``verb`` if nothing names one."""
        if self.file is None and self.preset is None:
            raise ConfigError(
                f"{verb} needs a run file (terashard {verb} RUN.toml) or --preset"
                f" {'|'.join(presets())}"
            )
        return load(self.file, self.overrides, self.preset)


def parse(kind: type[Arguments], words: Sequence[str], program: str) -> Arguments:
    """``words`` as a ``kind``; ConfigError for what is wrong, SystemExit after ``--help``."""
    open_ended = "overrides" in _names(kind)
    own, overrides = split(words) if open_ended else (list(words), [])
    if _HELP & set(words):
        _help(kind, [word for word in own if word not in _HELP], program)
    for word in own:
        if _OPTION.fullmatch(word) and word.partition("=")[0].replace("_", "-") not in _flags(kind):
            raise _refused(kind, word, program)
    parsed, unknown = _parse_known(kind, own, program)
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is one word too many; see {program} --help")
    return cast(Arguments, replace(parsed, overrides=tuple(overrides)) if open_ended else parsed)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A verb's own words, and the overrides."""
    own: list[str] = []
    overrides: list[str] = []
    target = own
    for word in words:
        if _OPTION.fullmatch(word):
            target = overrides if "." in word.partition("=")[0] else own
        target.append(word)
    return own, overrides


def _names(kind: Any) -> list[str]:
    return [f.name for f in fields(kind)]


def _flags(kind: type) -> list[str]:
    """Every spelling of every option of ``kind``, without its overrides and positional words."""
    flags: list[str] = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        marks = getattr(hint, "__metadata__", ())
        if tyro.conf.Positional in marks or name == "overrides":
            continue
        option = name.replace("_", "-")
        flags += [f"--{option}", f"--no-{option}"] if hint is bool else [f"--{option}"]
        flags += [alias for mark in marks for alias in getattr(mark, "aliases", None) or ()]
    return flags


def _parse_known(kind: type, words: Sequence[str], program: str) -> tuple[Any, list[str]]:
    """What tyro makes of ``words``, and the words left over; its complaints as ConfigError."""
    said = StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(
                kind, args=words, prog=program, return_unknown_args=True, add_help=False
            )
    except SystemExit as stop:
        if stop.code == 0:
            raise
        raise ConfigError(f"{_sentence(said.getvalue())}; see {program} --help") from None


def _sentence(message: str) -> str:
    """The first paragraph of tyro's message as one line, without its title and frame."""
    plain = message.translate(_FRAME).splitlines()
    body = [line.rstrip() for line in plain if line.startswith("  ")]
    missing = [line.strip() for line in body if re.match(r" {6}\S", line)]
    if missing and body[0].startswith("  Missing from"):
        return f"{missing[0]} is missing"
    paragraph = takewhile(lambda line: line and not line.startswith("  ---"), body)
    text = re.sub(
        r"Error parsing (\S+): no type matching (?:\{None\}\|)?(\S+) could be instantiated from"
        r" \['(.*)'\]",
        r"\1 is '\3'; it must be \2",
        " ".join(" ".join(paragraph).split()).removesuffix(" Expected 1 values."),
    )
    return text.rstrip(".") or "the command line cannot be understood"


def _refused(kind: type, word: str, program: str) -> ConfigError:
    """The error for an option that ``kind`` does not have, with the nearest one."""
    name = word.partition("=")[0]
    close = closest(name.replace("_", "-"), _flags(kind))
    if not close and "overrides" in _names(kind):
        return unknown_option(word)
    return ConfigError(f"there is no option {name}; {did_you_mean(close, f'see {program} --help')}")


def _help(kind: type, own: Sequence[str], program: str) -> NoReturn:
    """Print the help of a verb; one with overrides shows every key, with the run file's values."""
    if "overrides" in _names(kind):
        kind = _with_settings(kind, own, program)
    tyro.cli(kind, args=["--help"], prog=program)
    raise SystemExit(0)


def _with_settings(kind: type, own: Sequence[str], program: str) -> type:
    """``kind`` and the sections of a run, their defaults taken from the file and preset named."""
    named, _ = _parse_known(kind, own, program) if own else (None, [])
    current = load(getattr(named, "file", None), (), getattr(named, "preset", None))
    sections = []
    for section in fields(cast(Any, settings_type(current))):
        assert section.default_factory is not MISSING
        start = field(default_factory=section.default_factory)
        sections.append((section.name, section.type, start))
    merged = make_dataclass(kind.__name__, sections, bases=(kind,), frozen=True, kw_only=True)
    merged.__doc__ = kind.__doc__
    return merged
