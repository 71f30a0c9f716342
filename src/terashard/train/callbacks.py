"""Callbacks: functions of a run's own, called on every rank after every step.

::

    [train]
    callbacks = ["my_module:every_step"]          my_module.py lies in the current folder

    def every_step(trainer, record):              Trainer, StepRecord
        if record.step == 100:
            trainer.save()                        on every rank: saving is done together

``record`` says what the step did and is the same on all ranks but for its times; ``trainer`` has
``config``, ``pipeline`` (``named_parameters()``: this rank's rows), ``optimizer``, ``progress``,
``directory``, ``evaluate()``, ``save()`` and ``say(line)``. Set ``trainer.stopping`` to end the run
after this step. What decides whether a rank calls ``save``, ``evaluate`` or sets ``stopping`` must
be the same on all ranks. What a callback prints stands in the rank's log, but for the first rank's
standard output. An exception ends the run.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import TYPE_CHECKING

from terashard.errors import ConfigError, RunError, TerashardError
from terashard.train.record import StepRecord

if TYPE_CHECKING:
    from terashard.train.trainer import Trainer

Callback = Callable[["Trainer", StepRecord], None]


def require_module(name: str) -> None:
    """Refuse ``module:function`` if there is no such module; imports nothing."""
    module, _, function = name.partition(":")
    top = module.partition(".")[0]
    if not (top and function):
        raise ConfigError(f"train.callbacks: {name!r} names no function; write module:function")
    if top in sys.modules or PathFinder.find_spec(top, [os.getcwd()]) or find_spec(top):
        return
    raise ConfigError(
        f"train.callbacks: {name!r} cannot be imported (no module {top} in this folder, and none"
        " installed); write module:function"
    )


def load_callback(name: str) -> Callback:
    """The function that ``module:function`` names; an exception in it will name it."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Callback = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as cause:
        raise ConfigError(
            f"train.callbacks: {name!r} cannot be imported ({cause}); write module:function"
        ) from cause
    if not callable(found):
        raise ConfigError(f"train.callbacks: {name!r} is no function; write module:function")

    def call(trainer: "Trainer", record: StepRecord) -> None:
        try:
            found(trainer, record)
        except TerashardError:
            raise
        except Exception as cause:
            raise RunError(
                f"{trainer.pipeline.mesh}: callback {name} failed after step {record.step}:"
                f" {type(cause).__name__}: {cause}"
            ) from cause

    return call
