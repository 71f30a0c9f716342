"""TOML and the command line → RunConfig: the only place where strings become types.

Four layers, the later over the earlier::

    defaults (schema.py)  <  preset  <  run file  <  command line (--section.key value)

A run file names its preset in a top-level line ``preset = "tiny"``; ``--preset`` on the command
line wins. A key of a higher layer also puts aside what would contradict it below:
``--train.tokens`` the file's ``train.steps``, ``--parallel.slices`` the file's
``parallel.partition``. Every error begins with the place: the file and line, the preset or the
option.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from terashard.config.build import convert
from terashard.config.fields import keys, nearest, sections
from terashard.config.nearest import alternatives, did_you_mean
from terashard.config.override import read_overrides
from terashard.config.schema import RunConfig
from terashard.errors import ConfigError

_PUTS_ASIDE: Mapping[str, tuple[str, ...]] = {
    "train.steps": ("train.tokens", "train.epochs"),
    "train.tokens": ("train.steps", "train.epochs"),
    "train.epochs": ("train.steps", "train.tokens"),
    "parallel.slices": ("parallel.partition",),
    "parallel.micro_batches": ("parallel.partition",),
}
_HEADER = re.compile(r"\s*\[\[?\s*([\w.\-\s]+?)\s*\]\]?\s*(?:#.*)?")
_KEY = re.compile(r"\s*([\w.\-\s]+?)\s*=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one place says: a preset, a run file or the command line."""

    name: str
    values: Mapping[str, Any]
    """Dotted key → value, converted."""
    text: str = ""
    """The TOML it was read from, for line numbers."""

    def place(self, dotted: str) -> str:
        """Where ``dotted`` stands, as messages begin: ``run.toml, line 3``."""
        return _place(self.name, self.text, dotted)


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and the layer that gave it."""

    value: Any
    layer: Layer


def load(
    path: str | Path | None, overrides: Sequence[str] = (), preset: str | None = None
) -> RunConfig:
    """What a run file, a preset and command-line overrides say together, or a ConfigError."""
    return build(settings(layers(path, overrides, preset)))


def loads(text: str, name: str = "text") -> RunConfig:
    """Read a run file's text."""
    return build(settings(_file_layers(text, name)))


def layers(
    path: str | Path | None, overrides: Sequence[str] = (), preset: str | None = None
) -> list[Layer]:
    """Every place that says something, from the weakest to the strongest."""
    if path is None:
        found = _preset_layer(preset)
    else:
        found = _file_layers(_read(Path(path)), str(path), preset)
    if given := read_overrides(overrides):
        found.append(Layer(name="command line", values=given))
    return found


def settings(stack: Sequence[Layer]) -> dict[str, Setting]:
    """Dotted key → the strongest layer's value, of every key that some layer names."""
    merged: dict[str, Setting] = {}
    for layer in stack:
        for dotted, value in layer.values.items():
            if value is not None:
                for rival in _PUTS_ASIDE.get(dotted, ()):
                    merged.pop(rival, None)
        merged |= {dotted: Setting(value, layer) for dotted, value in layer.values.items()}
    return merged


def build(merged: Mapping[str, Setting]) -> RunConfig:
    """The configuration that the settings and the defaults make; each section checks itself."""
    made = {}
    for section, cls in sections().items():
        names = [key.name for key in keys().values() if key.section == section]
        chosen = {n: merged[f"{section}.{n}"].value for n in names if f"{section}.{n}" in merged}
        try:
            made[section] = cls(**chosen)
        except ConfigError as error:
            raise _placed(error, merged) from None
    return RunConfig(**made)


def presets() -> list[str]:
    """Names of the presets that come with the package."""
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in files("terashard.config").joinpath("presets").iterdir()
        if entry.name.endswith(".toml")
    )


def _file_layers(text: str, name: str, preset: str | None = None) -> list[Layer]:
    """A run file, and below it ``preset`` or the one that the file names."""
    table = _parse(text, name)
    named = table.pop("preset", None)
    if named is not None and not isinstance(named, str):
        place = _place(name, text, "preset")
        raise ConfigError(f"{place}: preset is {named}; it must be one of {', '.join(presets())}")
    return [*_preset_layer(preset or named), _layer(table, name, text)]


def _preset_layer(name: str | None) -> list[Layer]:
    if name is None:
        return []
    if name not in presets():
        raise ConfigError(f"there is no preset {name!r}; {alternatives(name, presets())}")
    text = files("terashard.config").joinpath("presets", f"{name}.toml").read_text("utf-8")
    place = f"preset {name}"
    return [_layer(_parse(text, place), place, text)]


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")  # some editors put a byte-order mark
    except FileNotFoundError:
        preset = f"--preset {path}" if str(path) in presets() else None
        hint = did_you_mean(preset) or "name a TOML file"
        raise ConfigError(f"{path} does not exist; {hint}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; name a TOML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; name a TOML file") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {error}") from None


def _layer(table: Mapping[str, Any], name: str, text: str) -> Layer:
    values: dict[str, Any] = {}
    for section, content in table.items():
        if section not in sections() or not isinstance(content, Mapping):
            raise _unknown_section(section, content, _place(name, text, section))
        for leaf, value in content.items():
            dotted = f"{section}.{leaf}"
            place = _place(name, text, dotted)
            if dotted not in keys():
                raise _unknown_key(section, leaf, place)
            values[dotted] = convert(value, keys()[dotted].type, f"{place}: {dotted}")
    return Layer(name=name, values=values, text=text)


def _unknown_section(name: str, content: Any, place: str) -> ConfigError:
    if name in sections():
        return ConfigError(f"{place}: {name} is a section; write [{name}] and its keys below it")
    if isinstance(content, Mapping):
        return ConfigError(
            f"{place}: section [{name}] is unknown; {alternatives(name, sections())}"
        )
    allowed = f"only preset may stand outside the sections {', '.join(sections())}"
    return ConfigError(f"{place}: {name} is unknown; {did_you_mean(nearest(name), allowed)}")


def _unknown_key(section: str, leaf: str, place: str) -> ConfigError:
    dotted = f"{section}.{leaf}"
    allowed = ", ".join(key.name for key in keys().values() if key.section == section)
    meant = did_you_mean(nearest(dotted), f"[{section}] allows {allowed}")
    return ConfigError(f"{place}: {dotted} is unknown; {meant}")


def _placed(error: ConfigError, merged: Mapping[str, Setting]) -> ConfigError:
    """The error of a section, with the place of the key that its sentence names first."""
    named = [word for word in re.findall(r"\w+\.\w+", str(error)) if word in merged]
    if not named:
        return error
    return ConfigError(f"{merged[named[0]].layer.place(named[0])}: {error}")


def _place(name: str, text: str, dotted: str) -> str:
    line = _line(text, dotted) or _line(text, dotted.partition(".")[0])
    return f"{name}, line {line}" if line else name


def _line(text: str, dotted: str) -> int | None:
    """The line that sets ``dotted``, as far as it can be seen without parsing TOML again."""
    header = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _HEADER.fullmatch(line):
            header = match[1]
            full = header
        elif match := _KEY.match(line):
            full = f"{header}.{match[1]}".lstrip(".")
        else:
            continue
        if full == dotted or full.startswith(f"{dotted}."):
            return number
    return None
