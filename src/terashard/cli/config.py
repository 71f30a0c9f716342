"""``terashard config show``: the configuration a run would have, whole or only what was chosen."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from terashard.cli.arguments import RunFile
from terashard.config.load import build, layers, settings
from terashard.config.write import differences, dump, to_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class Show(RunFile):
    """Print the configuration that a run file, a preset and options make, as a run file."""

    diff: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print only what differs from the defaults, and where it was said."""


def run(arguments: Show) -> int:
    """Print the configuration, or its differences from the defaults."""
    merged = settings(layers(arguments.file, arguments.overrides, arguments.preset))
    config = build(merged)
    if not arguments.diff:
        print(dump(config), end="")
        return 0
    changed = {
        f"{dotted} = {to_toml(value)}": (merged[dotted].layer.place(dotted), to_toml(base))
        for dotted, (base, value) in differences(config).items()
    }
    width = max(map(len, changed), default=0)
    for line, (place, base) in changed.items():
        print(f"{line:<{width}}  # {place}; {base} by default")
    return 0
