"""From plain tables to the frozen dataclasses of the schema, strictly.

A *table* is what TOML gives: dictionaries, lists, strings, numbers, booleans. ``convert`` turns one
value into the type the schema states, or says in one sentence what was found and what is allowed:

====================  ==========================================================================
a type of the schema  what a table may hold
====================  ==========================================================================
``int``               a whole number (not a boolean, not 1.0)
``float``             a finite number, whole or not
``bool``, ``str``     true or false; a string
``Literal[...]``      one of the listed values
``T | None``          T, or the string "none" (TOML has no null)
``tuple[T, ...]``     a list of T; one plain value stands for a list of one: ``slices = 4``
``tuple[T, U]``       a list of exactly these
a dataclass           a table with its fields
``dict[str, Any]``    any table; "none" in it is None
====================  ==========================================================================
"""

import math
import sys
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import date, datetime, time
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from terashard.config.nearest import alternatives, closest, did_you_mean
from terashard.errors import ConfigError

NONE = "none"
"""How None is written where a value may be missing."""


def convert(value: Any, to: Any, name: str) -> Any:
    """``value`` as the type ``to``; ``name`` is the dotted key that a ConfigError begins with."""
    origin = get_origin(to)
    if to is Any or origin is dict:
        return _free(value, to, name)
    if origin in (Union, types.UnionType):
        return _optional(value, to, name)
    if origin is Literal:
        return _choice(value, to, name)
    if origin is tuple:
        return _sequence(value, to, name)
    if is_dataclass(to):
        assert isinstance(to, type)
        return _record(value, to, name)
    return _scalar(value, to, name)


def describe(to: Any) -> str:
    """The type ``to`` in words, for messages."""
    origin, arguments = get_origin(to), get_args(to)
    if origin in (Union, types.UnionType):
        parts = [f'"{NONE}"' if part is type(None) else describe(part) for part in arguments]
        return " or ".join(parts)
    if origin is Literal:
        return " or ".join(f'"{choice}"' for choice in arguments)
    if origin is tuple:
        return _describe_tuple(arguments)
    if origin is dict or is_dataclass(to):
        return "a table"
    names = {
        int: "a whole number",
        float: "a finite number",
        bool: "true or false",
        str: "a string",
    }
    return names.get(to, "a TOML value")


def found(value: Any) -> str:
    """A value of a table as TOML would write it, shortened, for messages."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            text = f'the string "{value}"'
        case Mapping():
            text = f"a table of {', '.join(value) or 'nothing'}"
        case list() | tuple():
            text = "[" + ", ".join(str(item) for item in value) + "]"
        case _:
            text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def wrong(value: Any, to: Any, name: str) -> ConfigError:
    """The error for a value of the wrong type."""
    return ConfigError(f"{name} is {found(value)}; it must be {describe(to)}")


def _describe_tuple(arguments: tuple[Any, ...]) -> str:
    if arguments[-1] is not Ellipsis:
        return "[" + ", ".join(describe(part) for part in arguments) + "]"
    if arguments[0] is int:
        return "a whole number or a list of them"
    return f"a list, each of it {describe(arguments[0])}"


def _scalar(value: Any, to: type, name: str) -> Any:
    if to is float and type(value) is int and abs(value) < sys.float_info.max:
        value = float(value)
    if type(value) is not to or (isinstance(value, float) and not math.isfinite(value)):
        raise wrong(value, to, name)
    return value


def _optional(value: Any, to: Any, name: str) -> Any:
    if value is None or value == NONE:
        return None
    inner = [part for part in get_args(to) if part is not type(None)]
    assert len(inner) == 1, f"{name}: only T | None is supported"
    try:
        return convert(value, inner[0], name)
    except ConfigError:
        if is_dataclass(inner[0]):
            raise
        raise wrong(value, to, name) from None


def _choice(value: Any, to: Any, name: str) -> Any:
    choices = get_args(to)
    if value in choices:
        return value
    sentence = f"{name} is {found(value)}; it must be {describe(to)}"
    close = closest(str(value), map(str, choices))
    quoted = f'"{close}"'
    raise ConfigError(f"{sentence}; {did_you_mean(quoted)}" if close else sentence)


def _sequence(value: Any, to: Any, name: str) -> tuple[Any, ...]:
    arguments = get_args(to)
    if arguments[-1] is not Ellipsis:
        if not isinstance(value, list | tuple) or len(value) != len(arguments):
            raise wrong(value, to, name)
        return tuple(convert(v, t, name) for v, t in zip(value, arguments, strict=True))
    if not isinstance(value, list | tuple):
        if get_origin(arguments[0]) is not None or is_dataclass(arguments[0]):
            raise wrong(value, to, name)
        value = [value]
    return tuple(_item(item, to, f"{name}[{i}]") for i, item in enumerate(value))


def _item(value: Any, to: Any, name: str) -> Any:
    return convert(value, get_args(to)[0], name)


def _record(value: Any, to: type, name: str) -> Any:
    if not isinstance(value, Mapping):
        raise wrong(value, to, name)
    hints = get_type_hints(to)
    for key in value:
        if key not in hints:
            raise ConfigError(f"{name}.{key} is unknown; {alternatives(key, hints)}")
    for field in fields(to):
        required = field.default is MISSING and field.default_factory is MISSING
        if required and field.name not in value:
            raise ConfigError(
                f"{name}.{field.name} is missing; it must be {describe(hints[field.name])}"
            )
    return to(**{key: convert(item, hints[key], f"{name}.{key}") for key, item in value.items()})


def _free(value: Any, to: Any, name: str) -> Any:
    """Any TOML value except dates, which no option of ours takes; "none" means None."""
    if get_origin(to) is dict and not isinstance(value, Mapping):
        raise wrong(value, to, name)
    if isinstance(value, date | datetime | time):
        raise ConfigError(f"{name} is the date {value}; write it as a string")
    if isinstance(value, Mapping):
        return {key: _free(item, Any, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_free(item, Any, f"{name}[{i}]") for i, item in enumerate(value)]
    return None if value == NONE else value
