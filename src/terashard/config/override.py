"""The command line as one more layer over a run file: ``--section.key value``.

``tyro`` finds the options and draws the help; what a value may be is decided by the same
``convert`` as for TOML, so a wrong value reads the same in both places. For tyro, every section
gets a twin whose fields take any number of strings and start as ``Kept``: what is not ``Kept``
after parsing was named on the command line.

A value is written as in TOML (``1e-4``, ``true``, ``'{betas = [0.9, 0.95]}'``), text without
quotes. Lists may also be given item by item (``--parallel.slices 128 64 64``), true as the bare
option, None as ``none``.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import partial
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from terashard.config.build import NONE, convert, describe
from terashard.config.fields import Key, keys, nearest, sections
from terashard.config.nearest import did_you_mean
from terashard.config.schema import RunConfig
from terashard.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Kept:
    """A value that the command line did not name."""

    value: Any


def read_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Dotted key → value of everything that ``arguments`` name."""
    if not arguments:
        return {}
    twin: Any
    twin, unknown = tyro.cli(
        settings_type(RunConfig()), args=list(arguments), return_unknown_args=True, add_help=False
    )
    if unknown:
        raise unknown_option(unknown[0])
    values = {dotted: getattr(getattr(twin, k.section), k.name) for dotted, k in keys().items()}
    return {dotted: value for dotted, value in values.items() if not isinstance(value, Kept)}


def unknown_option(word: str) -> ConfigError:
    """The error for a word of the command line that is no option; names the nearest."""
    name = word.lstrip("-").partition("=")[0]
    if not word.startswith("-"):
        return ConfigError(f"{word!r} follows no option; write --section.key {word}")
    close = nearest(name)
    meant = did_you_mean(f"--{close}" if close else None, "--help lists them all")
    return ConfigError(f"there is no option {word.partition('=')[0]}; {meant}")


def settings_type(current: RunConfig) -> type:
    """A twin of RunConfig for tyro: the same names and help, ``current`` as defaults."""
    twins = []
    for section, cls in sections().items():
        twin = _section_type(section, cls, getattr(current, section))
        twins.append((section, twin, field(default_factory=twin)))
    return make_dataclass("Settings", twins, kw_only=True)


def _section_type(section: str, cls: type, current: Any) -> type:
    members = [key for key in keys().values() if key.section == section]
    twin = make_dataclass(
        cls.__name__,
        [(k.name, _option(k), field(default=Kept(getattr(current, k.name)))) for k in members],
        frozen=True,
        kw_only=True,
    )
    twin.__doc__ = cls.__doc__
    return twin


def _option(key: Key) -> Any:
    spec: PrimitiveConstructorSpec[Any] = PrimitiveConstructorSpec(
        nargs="*",
        metavar=_metavar(key.type),
        instance_from_str=partial(_read, key),
        is_instance=lambda _: True,
        str_from_instance=lambda kept: [_show(kept.value)],
    )
    return Annotated[Any, spec, tyro.conf.arg(help=key.help)]


def _read(key: Key, words: Sequence[str]) -> Any:
    """The words after an option as a value of its key."""
    if key.type is bool and not words:
        return True
    values = [_value(word, key.type) for word in words]
    several = get_origin(key.type) is tuple and (
        len(values) != 1 or not isinstance(values[0], list)
    )
    if not several and len(values) != 1:
        what = "nothing" if not words else f"{len(words)} values: {' '.join(words)}"
        raise ConfigError(
            f"--{key.dotted} got {what}; it takes one value, {describe(key.type)}"
            + (" (name files and folders before the options)" if words else "")
        )
    return convert(values if several else values[0], key.type, f"--{key.dotted}")


def _value(word: str, to: Any) -> Any:
    """A word as TOML reads it, or as it stands where text is wanted or TOML does not know it."""
    parts = get_args(to) if get_origin(to) in (Union, UnionType, tuple) else (to,)
    text = str in parts or Literal in [get_origin(part) for part in parts]
    is_list = get_origin(to) is tuple and word.startswith("[")
    if (text and not is_list) or "\n" in word:
        return word
    try:
        return tomllib.loads(f"value = {word}")["value"]
    except tomllib.TOMLDecodeError:
        return word


def _metavar(to: Any) -> str:
    origin, arguments = get_origin(to), get_args(to)
    if type(None) in arguments:
        return f"{_metavar(next(part for part in arguments if part is not type(None)))}|{NONE}"
    if origin is Literal:
        return "{" + ",".join(map(str, arguments)) + "}"
    if origin is tuple and arguments[0] in (int, str):
        return f"{_metavar(arguments[0])} ..."
    names = {int: "INT", float: "FLOAT", bool: "true|false", str: "TEXT"}
    return names.get(to, "LIST" if origin is tuple else "TABLE")


def _show(value: Any) -> str:
    match value:
        case None:
            return NONE
        case bool():
            return str(value).lower()
        case tuple():
            return " ".join(map(_show, value)) or "[]"
        case dict():
            return str(value)
        case _:
            return str(value)
