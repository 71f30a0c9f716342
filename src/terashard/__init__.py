"""terashard: token-slice pipelines over sharded parameters, driven by one schedule held as data.

Names are imported on first use, so that ``import terashard`` costs nothing.
"""

from importlib import import_module
from typing import Any

_HOMES: dict[str, str] = {
    "Carry": "terashard.nn.protocols",
    "Cell": "terashard.schedule.actions",
    "CrossEntropy": "terashard.nn.loss",
    "Grid": "terashard.schedule.actions",
    "KeyValueCarry": "terashard.nn.carry",
    "Mesh": "terashard.comm.mesh",
    "MicroBatch": "terashard.schedule.actions",
    "ModelSpec": "terashard.spec.model",
    "Pipeline": "terashard.runtime.pipeline",
    "Plan": "terashard.plan.plan",
    "Precision": "terashard.shard.precision",
    "RunConfig": "terashard.config.schema",
    "Schedule": "terashard.schedule.schedule",
    "StageModule": "terashard.nn.protocols",
    "StateCarry": "terashard.nn.carry",
    "StepResult": "terashard.runtime.pipeline",
    "TerashardError": "terashard.errors",
    "Timeline": "terashard.simulate.timeline",
    "TokenSlice": "terashard.nn.protocols",
    "check": "terashard.schedule.check",
    "run_threads": "terashard.comm.threads",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # slow to import

        return version("terashard")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'terashard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
