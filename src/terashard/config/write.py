"""RunConfig → TOML text, its fingerprint, and what it differs in.

``loads(dump(config)) == config`` for every configuration. The text names every key, also those at
their default, so that it means the same under a later version's defaults. None is written "none".
"""

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from typing import Any

from terashard.config.build import NONE
from terashard.config.fields import Key, keys, sections
from terashard.config.schema import ParameterGroup, RunConfig
from terashard.errors import ConfigError

FORMAT = 1
_PACKAGES = ("terashard", "torch", "numpy", "safetensors", "tokenizers", "tyro", "rich")
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dump(config: RunConfig) -> str:
    """The whole configuration as a run file."""
    opening = f"# terashard run, format {FORMAT}, fingerprint {fingerprint(config)}\n"
    return opening + _body(config)


def fingerprint(config: RunConfig) -> str:
    """Twelve hexadecimal digits that two configurations share only if they say the same."""
    return hashlib.sha256(_body(config).encode("utf-8")).hexdigest()[:12]


def versions() -> dict[str, str]:
    """Versions of Python and of every package a run depends on, without importing any."""
    return {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def differences(config: RunConfig, base: RunConfig | None = None) -> dict[str, tuple[Any, Any]]:
    """Dotted key → (value in ``base``, value in ``config``) where they differ.

    ``base`` is by default what an empty run file means.
    """
    base = base or RunConfig()
    pairs = {dotted: (value_of(base, key), value_of(config, key)) for dotted, key in keys().items()}
    return {dotted: pair for dotted, pair in pairs.items() if pair[0] != pair[1]}


def value_of(config: RunConfig, key: Key) -> Any:
    """What ``config`` says for ``key``."""
    return getattr(getattr(config, key.section), key.name)


def to_toml(value: Any) -> str:
    """One value as TOML writes it, on one line."""
    match value:
        case None:
            return f'"{NONE}"'
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(to_toml, value))}]"
        case ParameterGroup(match=match, options=options):
            return to_toml({"match": match, "options": options})
        case Mapping():
            inside = ", ".join(f"{_name(k)} = {to_toml(v)}" for k, v in value.items())
            return f"{{{inside}}}"
    raise ConfigError(
        f"{value!r} cannot be written to a run file; use numbers, strings, booleans, lists, tables"
    )


def _body(config: RunConfig) -> str:
    lines = []
    for section in sections():
        lines.append(f"\n[{section}]")
        for key in keys().values():
            if key.section == section:
                lines.append(f"{key.name} = {to_toml(_typed(value_of(config, key), key.type))}")
    return "\n".join(lines) + "\n"


def _typed(value: Any, to: Any) -> Any:
    """A whole number as a float where the schema says float: 1 and 1.0 have one fingerprint."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if whole and to in (float, float | None) else value


def _name(key: str) -> str:
    return key if _BARE.fullmatch(key) else to_toml(key)


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
