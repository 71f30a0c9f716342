"""``terashard version``: the versions that matter in a bug report."""

from dataclasses import dataclass

from terashard.config.write import versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Print the versions of terashard, Python and the packages a run depends on."""


def run(arguments: Version) -> int:
    """Print one version a line."""
    for name, number in versions().items():
        print(f"{name:<12}{number}")
    return 0
