"""``fully_shard``: torch's signature and meaning, terashard's engine.

A program that says ``from torch.distributed.fsdp import fully_shard`` runs with
``from terashard import fully_shard``. The policies are torch's own classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

from terashard.errors import ConfigError
from terashard.shard.born import Request, shard_modules
from terashard.shard.module import ShardedModule, UnshardHandle, sharded_class
from terashard.shard.placement import DataMesh
from terashard.shard.rules import Pool, Rules
from terashard.shard.tree import sharding_of

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardPlacementResult",
    "ShardedModule",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

PlacementFunction = Callable[[nn.Parameter], Any]


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFunction | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # a frozen value
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  # never changed
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    pool: Pool = "static",
) -> Any:
    """Shard the parameters of ``module``, or of a list of modules as one unit, in place.

    ``mesh``: one axis, over which parameters are cut, or two, (replicate, shard); by default all
    ranks. ``reshard_after_forward``: let parameters go after forward and gather them again for
    backward; by default all but the root's; a number cuts them over as many ranks meanwhile.
    ``shard_placement_fn`` says per parameter along which dim it is cut (``Shard``), that it is
    copied (``Replicate``), or over which ranks (``ShardPlacementResult``). ``dp_mesh_dims`` names
    the data axes of a full mesh on which the parameters are DTensors already.

    ``pool``, beyond torch: "static" slots that are reused for ever, "any" free slot (needs the
    least memory where modules run in a changing order), or "off", memory of one's own for every
    unit, which autograd functions need that keep parameters outside ``save_for_backward``.

    Returns ``module``, whose class is now a ``ShardedModule`` too. To be called on inner modules
    first. Raises ``ValueError`` or ``ConfigError`` for a module, mesh or placement it cannot take.
    """
    modules = list(module) if isinstance(module, list | tuple) else [module]
    for one in modules:
        _require_module(one)
    if pool not in get_args(Pool):
        raise ConfigError(f"there is no pool {pool!r}; there are: {', '.join(get_args(Pool))}")
    data = DataMesh.of(_default_mesh() if mesh is None else mesh, dp_mesh_dims)
    reshard = _checked_reshard(reshard_after_forward, data)
    rules = Rules(
        precision=mp_policy,
        reshard_after_forward=reshard,
        offload=isinstance(offload_policy, CPUOffloadPolicy),
    )
    request = Request(
        data=data,
        rules=rules,
        pool=pool,
        placement=shard_placement_fn,
        ignored=frozenset(ignored_params or ()),
    )
    sharding = shard_modules(modules, request)
    for one in modules:
        one.__dict__["_sharding"] = sharding
        one.__class__ = sharded_class(type(one), moving=pool == "any")
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.method_name(…)`` gather and release parameters as ``forward`` does.

    Does nothing for a module that is not sharded, so that a program can say it in any case.
    """
    if sharding_of(module) is None:
        return
    if not hasattr(module, method_name):
        raise ValueError(
            f"{type(module).__name__} does not have a method {method_name}; name one of its own"
        )
    plain = getattr(module, method_name)
    function = getattr(plain, "__func__", None)

    @functools.wraps(plain)
    def hooked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A copy of the module is another self, and not sharded.
        run = plain if function is None else MethodType(function, self)
        sharding = sharding_of(self)
        if sharding is None:
            return run(*args, **kwargs)
        try:
            args, kwargs = sharding.pre_forward(self, args, kwargs)
            with sharding.notes(self):
                output = run(*args, **kwargs)
            return sharding.post_forward(self, args, output)
        finally:
            sharding.leave()

    setattr(module, method_name, MethodType(hooked, module))


def share_comm_ctx(modules: list[ShardedModule]) -> None:
    """Accept torch's wish that several roots share streams; gathers wait for nothing else here."""
    for module in modules:
        if not isinstance(module, ShardedModule):
            raise ValueError(f"expects a list of sharded modules, but got {type(module).__name__}")


def _require_module(module: nn.Module) -> None:
    if (
        isinstance(module, nn.ModuleList | nn.ModuleDict)
        and type(module).forward is nn.Module.forward
    ):
        raise ValueError(
            "fully_shard does not support containers that do not implement forward, such as this"
            f" {type(module).__name__} of {len(module)}; shard its members, or give them as a list"
        )


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(kind, (dist.get_world_size(),))


def _checked_reshard(wanted: Any, data: DataMesh) -> bool | int | None:
    if wanted is None or isinstance(wanted, bool):
        return wanted
    if not isinstance(wanted, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to"
            f" reshard to, not {wanted!r}"
        )
    if data.dims is not None:
        raise NotImplementedError(
            f"reshard_after_forward = {wanted} needs a mesh of data axes only, without"
            " dp_mesh_dims; give True or False"
        )
    if wanted < 1 or data.shards % wanted:
        raise ValueError(
            f"reshard_after_forward as an int should be a factor of {data.shards}, not {wanted}"
        )
    if wanted == 1:
        return False
    return True if wanted == data.shards else wanted
