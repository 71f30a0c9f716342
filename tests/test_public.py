"""What ``import terashard`` promises: these names, and no torch until one of them is used."""

import subprocess
import sys

import pytest

import terashard

PUBLIC = [
    "CPUOffloadPolicy",
    "Carry",
    "Cell",
    "CrossEntropy",
    "DataParallelMeshDims",
    "Grid",
    "KeyValueCarry",
    "Mesh",
    "MicroBatch",
    "MixedPrecisionPolicy",
    "ModelSpec",
    "OffloadPolicy",
    "Pipeline",
    "Plan",
    "Precision",
    "RowwiseAdagrad",
    "RunConfig",
    "Schedule",
    "ShardPlacementResult",
    "ShardedGradScaler",
    "ShardedModule",
    "SparseAdam",
    "StageModule",
    "StateCarry",
    "StepResult",
    "TerashardError",
    "Timeline",
    "TokenSlice",
    "UnshardHandle",
    "__version__",
    "check",
    "describe_units",
    "full_parameters",
    "full_state_dict",
    "fully_shard",
    "initialise",
    "load_full",
    "load_optimizer_by_name",
    "of_class",
    "of_size",
    "optimizer_by_name",
    "read_full",
    "register_fsdp_forward_method",
    "run_threads",
    "save_full",
    "shard_where",
    "share_comm_ctx",
    "synchronise",
    "synchronise_buffers",
    "touched_rows",
]


def test_the_public_names_are_exactly_these() -> None:
    assert terashard.__all__ == PUBLIC
    assert dir(terashard) == PUBLIC


@pytest.mark.parametrize("name", terashard.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(terashard, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'pipelines'"):
        _ = terashard.pipelines


def test_importing_terashard_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, terashard\n"
        "assert terashard.__version__\n"
        "assert not {'torch', 'numpy', 'tyro', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
