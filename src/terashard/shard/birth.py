r"""Values for a sharded module that was built on ``meta``, one unit full at a time.

::

    with torch.device("meta"): model = Model()
    for block in model.blocks: fully_shard(block)
    fully_shard(model)
    initialise(model)              # or initialise(model, init=my_function)

Modules are visited as they were built: children before their parent, in order of registration. Each
calls its ``reset_parameters``, ``init_weights`` or ``_reset_parameters`` (or the caller's function)
on full tensors; when the last module of a unit has been visited, this rank's parts are kept and the
rest is freed. So the most that is held beyond the parts is the root's own unit and one more. With
the same seed on every rank, the values are those of a build on one device, to the bit, if each
module writes its own parameters and buffers.

A tensor that nobody wrote would hold whatever was in memory. Every operation that writes is
watched, so such a tensor is an error that names it. So is a random write to a parameter that is in
pieces already, as a parent makes that draws the weights of a unit inside: every rank would draw the
same numbers for rows that differ. Ranks whose random states differ are told so at the first forward
pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from terashard.errors import ConfigError, RunError
from terashard.shard.born import digest_of
from terashard.shard.hooks import Sharding
from terashard.shard.param import ShardedParameter
from terashard.shard.tree import managed, shardings_in
from terashard.shard.unborn import children_first, unborn_modules

_RESETS = ("reset_parameters", "init_weights", "_reset_parameters")


def initialise(module: nn.Module, *, init: Callable[[nn.Module], Any] | None = None) -> nn.Module:
    """Write every parameter and buffer of ``module`` that is still on ``meta``.

    ``init`` is called with every module, children first, instead of the modules' own methods; not
    with those whose tensors all have values already. All ranks must have the same random state, and
    call. Raises ``RunError`` for a tensor that nothing wrote, and ``ConfigError`` for a module that
    is not sharded. Returns ``module``.
    """
    shardings = shardings_in(module)
    if not shardings:
        raise ConfigError("initialise takes a module that fully_shard has sharded; shard it first")
    unborn = unborn_modules(module, shardings)
    with _Writes(module) as writes, torch.no_grad():
        births = [_Birth(sharding, writes) for sharding in shardings]
        loose = _Loose(module, births, writes)
        for child in children_first(module):
            here = [birth for birth in births if child in birth.modules]
            if child in unborn:
                for birth in here:
                    birth.begin()
                (init or _reset)(child)
            for birth in here:
                birth.leave(child)
        for birth in births:
            birth.end()
        loose.end()
    return module


class _Birth:
    """One unit's full tensors, from its first module to its last."""

    def __init__(self, sharding: Sharding, writes: _Writes) -> None:
        self.sharding = sharding
        self.modules = {module: None for _, module in managed(sharding.modules)}
        self._writes = writes
        self._left = set(self.modules)
        self._full: dict[ShardedParameter, nn.Parameter] = {}
        self._buffers: dict[tuple[nn.Module, str], Tensor] = {}
        self._has_begun = False

    def begin(self) -> None:
        """Put full tensors in place of those that were never written."""
        if self._has_begun:
            return
        self._has_begun = True
        self.sharding.reshard()
        for unit in self.sharding.units:
            for p in unit.parameters:
                if not p.written:
                    self._full[p] = self._place(p, unit.axes.device)
        for child in self.modules:
            for name, buffer in child._buffers.items():
                if buffer is not None and buffer.is_meta:
                    made = torch.empty_like(buffer, device=self.sharding.units[0].axes.device)
                    self._buffers[child, name] = child._buffers[name] = made
                    self._writes.watch(made)

    def leave(self, child: nn.Module) -> None:
        """A module has been visited; after the last one, keep the parts of the full tensors."""
        self._left.discard(child)
        if not self._left:
            self.end()

    def end(self) -> None:
        """Keep the parts of the full tensors, and free these."""
        for p, full in self._full.items():
            there = p.places[0].find()
            assert there is not None
            if there is full:
                self._writes.require(full, p.places[0].module, p.places[0].attribute)
            p.local.copy_(p.own_rows(there.detach()))
            p.written, p.digest = True, self._digest(there)
            p.show_sharded()
        for (owner, name), made in self._buffers.items():
            if owner._buffers[name] is made:
                self._writes.require(made, owner, name)
        for held in (*self._full.values(), *self._buffers.values()):
            self._writes.forget(held)
        self._full.clear()
        self._buffers.clear()
        if self._has_begun:
            for unit in self.sharding.units:
                unit.rewritten()
        self._has_begun = False

    def _digest(self, full: Tensor) -> int | None:
        """A checksum for the first forward pass, where ranks that drew otherwise are told so."""
        return digest_of(full) if len(self.sharding.units[0].ranks) > 1 else None

    def _place(self, p: ShardedParameter, device: torch.device) -> nn.Parameter:
        if p.dress is not None:
            raise ConfigError(
                f"parameter {p.name} is spread over a tensor-parallel mesh; initialise it with"
                " to_empty and torch.nn.init, which know such tensors"
            )
        full = nn.Parameter(
            torch.empty(p.shape, dtype=p.form.dtype, device=device), requires_grad=p.trainable
        )
        for place in p.places:
            place.put(full)
        self._writes.watch(full)
        return full


class _Loose:
    """Tensors on meta that are in no unit: parameters that are ignored, and what stands outside."""

    def __init__(self, module: nn.Module, births: list[_Birth], writes: _Writes) -> None:
        self._writes = writes
        self._made: list[tuple[nn.Module, str, Tensor]] = []
        device = births[0].sharding.units[0].axes.device
        inside = {child for birth in births for child in birth.modules}
        same: dict[Tensor, Tensor] = {}
        for child in module.modules():
            held: list[dict[str, Any]] = [child._parameters]
            for tensors in held if child in inside else [*held, child._buffers]:
                for name, tensor in tensors.items():
                    if tensor is None or not tensor.is_meta:
                        continue
                    if tensor not in same:
                        same[tensor] = _empty(tensor, device)
                        writes.watch(same[tensor])
                    tensors[name] = same[tensor]
                    self._made.append((child, name, same[tensor]))

    def end(self) -> None:
        """Refuse what was not written."""
        for owner, name, made in self._made:
            if made is owner._parameters.get(name) or made is owner._buffers.get(name):
                self._writes.require(made, owner, name)


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers which of the tensors that are watched an operation wrote to."""

    def __init__(self, top: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._top = top
        self._watched: set[int] = set()
        self._written: set[int] = set()

    def watch(self, tensor: Tensor) -> None:
        """Notice writes to the memory of ``tensor``, until ``forget``; it must be held as long."""
        here = tensor.untyped_storage()._cdata
        self._watched.add(here)
        self._written.discard(here)

    def forget(self, tensor: Tensor) -> None:
        """Notice them no more: the memory may be another tensor's soon."""
        here = tensor.untyped_storage()._cdata
        self._watched.discard(here)
        self._written.discard(here)

    def require(self, tensor: Tensor, owner: nn.Module, attribute: str) -> None:
        """Refuse ``tensor``, which was made without values, if it still has none."""
        has_other_memory = tensor.untyped_storage()._cdata not in self._watched  # by .data = …
        if has_other_memory or self.saw(tensor):
            return
        names = {child: name for name, child in self._top.named_modules()}
        name = f"{names.get(owner, '')}.{attribute}".removeprefix(".")
        raise RunError(
            f"{name} was built on meta, and nothing wrote it: it would hold whatever is in memory."
            " Write it in its module's reset_parameters, or pass initialise(…, init=function)"
        )

    def saw(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` has no elements, or was written to."""
        return not tensor.numel() or tensor.untyped_storage()._cdata in self._written

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = kwargs.get(argument.name, args[position] if position < len(args) else None)
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    self._note(func, tensor)
        return func(*args, **kwargs)

    def _note(self, func: Any, tensor: Any) -> None:
        if isinstance(tensor, DTensor):
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise RunError(
                    f"{func._schema.name} draws {self._name_of(tensor)}, which is in pieces"
                    " already: its unit is done, or it had values. Let the module that owns it draw"
                    " it, or leave it out with initialise(…, init=function)"
                )
        elif isinstance(tensor, Tensor):
            self._written |= self._watched & {tensor.untyped_storage()._cdata}

    def _name_of(self, tensor: DTensor) -> str:
        here = tensor._local_tensor.data_ptr()
        for name, found in self._top.named_parameters():
            if isinstance(found, DTensor) and found._local_tensor.data_ptr() == here:
                return f"parameter {name}"
        return f"a parameter of shape {tuple(tensor.shape)}"


def _empty(like: Tensor, device: torch.device) -> Tensor:
    made = torch.empty_like(like, device=device)
    return nn.Parameter(made, like.requires_grad) if isinstance(like, nn.Parameter) else made


def _reset(module: nn.Module) -> None:
    for name in _RESETS:
        method = getattr(module, name, None)
        if callable(method):
            method()
            return
