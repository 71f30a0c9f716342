"""``python -m terashard`` and ``torchrun -m terashard`` do what the command ``terashard`` does."""

from terashard.cli.main import entry

entry()
