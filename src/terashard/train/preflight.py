"""Refuses a run that cannot be, without torch, and works out what all of its processes must know.

The command calls ``check`` before anything is written; the launcher and every worker make the same
model and plan of the same configuration by the same functions.
"""

import os
from typing import TYPE_CHECKING

from terashard.config.optimizers import require_known, require_matches
from terashard.config.schema import RunConfig, RunSection, TrainConfig
from terashard.errors import ConfigError
from terashard.train.callbacks import require_module

if TYPE_CHECKING:
    from terashard.plan.plan import Plan
    from terashard.spec.model import ModelSpec


def check(config: RunConfig, processes: int | None = None) -> "tuple[ModelSpec, Plan]":
    """Refuse what can be refused without torch; returns what the model is and how it is cut.

    ``processes`` is the number that the user asked for, if any.
    """
    require_length(config.train)
    if not config.data.train:
        raise ConfigError(
            "data.train is empty; name a folder that `terashard data prepare` has made"
        )
    for name in config.train.callbacks:
        require_module(name)
    require_known(config.optimizer)
    spec, plan = model_and_plan(config)
    require_matches(config.optimizer, spec.parameters().keys())
    if processes is not None and processes != plan.processes:
        raise ConfigError(
            f"-n {processes} does not match parallel: {plan.replicas} replicas x {plan.stages}"
            f" stages x {plan.shards} shards = {plan.processes} processes; leave -n out, or change"
            " one of them"
        )
    return spec, plan


def model_and_plan(config: RunConfig) -> "tuple[ModelSpec, Plan]":
    """What the model is, and how the run is cut."""
    from terashard.data.tokens import TokenFolder  # these bring numpy, which help does without
    from terashard.plan.plan import plan_of
    from terashard.spec.model import describe

    vocab_size = TokenFolder.open(config.data.train).vocab_size
    spec = describe(config.model, vocab_size=vocab_size, max_length=config.batch.tokens)
    return spec, plan_of(config, config.model.num_layers)


def require_length(train: TrainConfig) -> None:
    """Refuse a run without a length."""
    if train.steps is None and train.tokens is None and train.epochs is None:
        raise ConfigError("the run has no length; give train.steps, train.tokens or train.epochs")


def require_work(step: int, steps: int) -> None:
    """Refuse a run whose ``steps`` are all done."""
    if step >= steps:
        raise ConfigError(
            f"the run has done {step} of {steps} steps and is complete; give a greater"
            " --train.steps to go on"
        )


def threads_each(run: RunSection, processes: int) -> int:
    """Threads of each of the ``processes`` on this machine."""
    return run.threads or max(1, len(os.sched_getaffinity(0)) // processes)
