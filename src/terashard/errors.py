"""Every exception terashard raises on purpose.

::

    TerashardError
    ├── ConfigError        a run file, a command line, a value in them
    ├── PlanError          stages, shards, slices or layers that do not fit together
    ├── ScheduleError      a list of actions that would hang, lose work or break a channel's order
    ├── DataError          text, tokens, documents
    ├── CheckpointError    a checkpoint that is missing, broken or of another model
    └── RunError           something that happened while a run was going on
        └── CommunicationError   a peer that is gone, a message that did not come

A message says what was found, what is allowed, and what to do. On a cluster, rank, stage and cell
come first.
"""


class TerashardError(Exception):
    """Base class: the command line prints its message alone, without a traceback."""


class ConfigError(TerashardError):
    """A run file, a command-line value or a combination of them is wrong."""


class PlanError(TerashardError):
    """Stages, shards, slices or layers do not fit together."""


class ScheduleError(TerashardError):
    """A list of actions would hang, lose work or break a channel's order."""


class DataError(TerashardError):
    """Text, tokens or documents are missing or unusable."""


class CheckpointError(TerashardError):
    """A checkpoint is missing, incomplete, damaged or of another model."""


class RunError(TerashardError):
    """Something went wrong while a run was going on."""


class CommunicationError(RunError):
    """A peer is gone, or a message did not arrive in time."""
