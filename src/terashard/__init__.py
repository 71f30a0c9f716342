"""terashard: token-slice pipelines over sharded parameters, driven by one schedule held as data.

Names are imported on first use, so that ``import terashard`` costs nothing.
"""

from importlib import import_module
from typing import Any

_HOMES: dict[str, str] = {
    "CPUOffloadPolicy": "terashard.shard.api",
    "Carry": "terashard.nn.protocols",
    "Cell": "terashard.schedule.actions",
    "CrossEntropy": "terashard.nn.loss",
    "DataParallelMeshDims": "terashard.shard.api",
    "Grid": "terashard.schedule.actions",
    "KeyValueCarry": "terashard.nn.carry",
    "Mesh": "terashard.comm.mesh",
    "MicroBatch": "terashard.schedule.actions",
    "MixedPrecisionPolicy": "terashard.shard.api",
    "ModelSpec": "terashard.spec.model",
    "OffloadPolicy": "terashard.shard.api",
    "Pipeline": "terashard.runtime.pipeline",
    "Plan": "terashard.plan.plan",
    "Precision": "terashard.shard.precision",
    "RowwiseAdagrad": "terashard.shard.sparse",
    "RunConfig": "terashard.config.schema",
    "Schedule": "terashard.schedule.schedule",
    "ShardPlacementResult": "terashard.shard.api",
    "ShardedGradScaler": "terashard.shard.scaler",
    "ShardedModule": "terashard.shard.api",
    "SparseAdam": "terashard.shard.sparse",
    "StageModule": "terashard.nn.protocols",
    "StateCarry": "terashard.nn.carry",
    "StepResult": "terashard.runtime.pipeline",
    "TerashardError": "terashard.errors",
    "Timeline": "terashard.simulate.timeline",
    "TokenSlice": "terashard.nn.protocols",
    "UnshardHandle": "terashard.shard.api",
    "check": "terashard.schedule.check",
    "describe_units": "terashard.shard.policy",
    "full_parameters": "terashard.shard.whole",
    "full_state_dict": "terashard.shard.whole",
    "fully_shard": "terashard.shard.api",
    "initialise": "terashard.shard.birth",
    "load_full": "terashard.shard.loading",
    "load_optimizer_by_name": "terashard.shard.optimizer_state",
    "of_class": "terashard.shard.policy",
    "of_size": "terashard.shard.policy",
    "optimizer_by_name": "terashard.shard.optimizer_state",
    "read_full": "terashard.checkpoint.full",
    "register_fsdp_forward_method": "terashard.shard.api",
    "run_threads": "terashard.comm.threads",
    "save_full": "terashard.checkpoint.full",
    "shard_where": "terashard.shard.policy",
    "share_comm_ctx": "terashard.shard.api",
    "synchronise": "terashard.shard.whole",
    "synchronise_buffers": "terashard.shard.whole",
    "touched_rows": "terashard.shard.sparse",
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
