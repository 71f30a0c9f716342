"""What a sharded module can do beyond what it could before: torch's methods, torch's meaning.

``fully_shard`` puts ``ShardedModule`` in front of the module's own class, so ``isinstance`` holds
as before and names do not change. It is no subclass of torch's ``FSDPModule``, because torch looks
for private state in those.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from terashard.errors import ConfigError
from terashard.shard.hooks import Sharding
from terashard.shard.tree import sharding_of, shardings_in

_CLASSES: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


class UnshardHandle:
    """Stands for parameters that are on their way."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding: Sharding | None = sharding

    def wait(self) -> None:
        """Block until the parameters are full, and let them stand in the module."""
        if self._sharding is not None:
            self._sharding.unshard()
            self._sharding = None


class ShardedModule(nn.Module):
    """A module whose parameters are kept in pieces; made by ``fully_shard``."""

    _original: type[nn.Module]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a plain module: what indexing a sharded container asks for."""
        plain = cls._original.__new__(cls._original)
        plain.__init__(*args, **kwargs)  # type: ignore[misc]
        return plain

    # ---- by hand --------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Make this module's own parameters full; with ``async_op`` only issue it."""
        self._own.issue()
        handle = UnshardHandle(self._own)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Let go of this module's own full parameters."""
        self._own.reshard()

    def reset_iter_state(self) -> None:
        """Clear away what a pass that raised left behind; its gradients are lost.

        The next pass does so by itself. To be called on the root.
        """
        own = self._own
        root = own.settled(self)
        if not own.is_root:
            raise RuntimeError("reset_iter_state must be called on the root module")
        root.abandon()

    # ---- choices --------------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Say whether a backward ends with sums over the ranks, or gradients wait unsharded."""
        for sharding in self._all(recurse):
            sharding.rules.sums = sharding.rules.sums_replicas = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Say whether sums go over replicas too, or wait as partial sums of the shards."""
        for sharding in self._all(recurse):
            sharding.rules.sums_replicas = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Say whether parameters are let go of after forward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                "reshard_after_forward should be a bool, got"
                f" {type(reshard_after_forward).__name__}"
            )
        for sharding in self._all(recurse):
            sharding.rules.reshard_after_forward = reshard_after_forward
            sharding.rules.is_default = False

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Say whether parameters are let go of after backward."""
        for sharding in self._all(recurse):
            sharding.rules.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Say whether backward needs this module's parameters (an embedding's does not)."""
        self._own.rules.unshard_in_backward = unshard_in_backward

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accept torch's wish: every backward finishes its own sums here."""

    def set_modules_to_forward_prefetch(self, modules: list[ShardedModule]) -> None:
        """Name the modules whose gathers are issued when this one runs forward."""
        self._own.forward_prefetch = [_required(module) for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list[ShardedModule]) -> None:
        """Name the modules whose gathers are issued when this one runs backward."""
        self._own.backward_prefetch = [_required(module) for module in modules]

    def set_gathers_ahead(self, count: int) -> None:
        """Set how many gathers are issued before their turn; beyond torch, on the root.

        By default one on a GPU, where it hides behind computing, and none on a CPU.
        """
        if count < 0:
            raise ValueError(f"{count} gathers ahead is no number of gathers; give 0 or more")
        self._own.settled(self).ahead = count

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor``, not by the number of ranks."""
        self._own.rules.divisor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor``: the former name."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept torch's wish for plain sums: here they always are, and divided afterwards."""

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Say whether sums have a communicator of their own, as they have by default."""
        for sharding in self._all(recurse):
            for unit in sharding.units:
                unit.separate_groups(enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Say whether ranks may use different parameters; if False, all must use the same ones.

        By default they may: a unit that one rank does not use takes part with zeros. With False,
        units that no rank uses cost nothing.
        """
        for sharding in self._all(recurse):
            sharding.rules.sums_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many sums may be on their way at a time."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        for sharding in self._all(recurse):
            sharding.rules.max_flying = max_input_buffers

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather this module's parameters through ``comm``, an object as torch describes it."""
        self._one_unit("set_custom_all_gather").custom_gather(comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Sum this module's gradients through ``comm``, an object as torch describes it."""
        self._one_unit("set_custom_reduce_scatter").custom_scatter(comm)

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], None], *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Call ``hook`` with the summed gradients of this module, flat, before they are used."""
        if stream is not None and self._one_unit("set_all_reduce_hook").axes.replicas > 1:
            raise ValueError("stream cannot be set when gradients are summed over replicas")
        self._one_unit("set_all_reduce_hook")
        self._own.rules.after_sum = hook

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Accept torch's wish: gathers follow the stream of the optimizer here, so they wait."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refuse: buffers are reused for ever here, and never the process group's."""
        if enable:
            _refuse_memory("set_allocate_memory_from_process_group_for_comm")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refuse: buffers are reused for ever here, and never symmetric memory."""
        _refuse_memory("set_symm_mem_for_comm")

    # ---- what torch's modules do ----------------------------------------------------------------

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        for sharding in self._all(recurse=True):
            sharding.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        for sharding in self._all(recurse=True):
            for unit in sharding.units:
                unit.adopt()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the shards: a plain module that holds DTensors, for averages and checkpoints."""
        own = self._own
        own.reshard()
        for unit in own.units:
            for p in unit.parameters:
                memo.setdefault(id(p.sharded), p.copied())
        plain = self._original.__new__(self._original)
        memo[id(self)] = plain
        ours = {handle.id for handle in own.handles}
        for name, value in self.__dict__.items():
            if name != "_sharding":
                kept = _without(value, ours) if "_hooks" in name else value
                plain.__dict__[name] = copy.deepcopy(kept, memo)
        return plain

    @property
    def _own(self) -> Sharding:
        return _required(self)

    def _all(self, recurse: bool) -> Iterator[Sharding]:
        yield from shardings_in(self) if recurse else [self._own]

    def _one_unit(self, method: str) -> Any:
        units = self._own.units
        if len(units) != 1:
            raise ValueError(
                f"{method} is not supported for a module with {len(units)} units, cut over"
                " different meshes: it would be ambiguous which is meant"
            )
        return units[0]


class MovingModule(ShardedModule):
    """A sharded module whose parameters may be elsewhere when its backward pass runs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward; autograd keeps notes of its parameters, not views."""
        with self._own.notes(self):
            return super().forward(*args, **kwargs)


def sharded_class(original: type[nn.Module], *, moving: bool = False) -> type[nn.Module]:
    """``original`` with ``ShardedModule`` in front, the same class at every call."""
    front = MovingModule if moving else ShardedModule
    if (original, front) not in _CLASSES:
        name = f"Sharded{original.__name__}"
        _CLASSES[original, front] = type(name, (front, original), {"_original": original})
    return _CLASSES[original, front]


def _without(hooks: Any, ours: set[int]) -> Any:
    """A module's table of hooks without those that drive its units."""
    if not isinstance(hooks, dict):
        return hooks
    return type(hooks)((key, hook) for key, hook in hooks.items() if key not in ours)


def _required(module: nn.Module) -> Sharding:
    sharding = sharding_of(module)
    if sharding is None or not isinstance(module, ShardedModule):
        raise ValueError(
            f"expects a module that fully_shard has sharded, but got {type(module).__name__}"
        )
    return sharding


def _refuse_memory(method: str) -> NoReturn:
    raise ConfigError(
        f"{method} chooses where torch's engine allocates staging buffers; there are none here:"
        " parameters are gathered in place, into buffers that are reused. Leave the call out"
    )
