"""``python -m terashard``, and ``torchrun -m terashard``."""

from terashard.cli.main import entry

entry()
