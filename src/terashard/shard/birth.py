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
watched, so such a tensor is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from terashard.errors import ConfigError, RunError
from terashard.shard.hooks import Sharding, sharding_of, shardings_in
from terashard.shard.param import ShardedParameter

_RESETS = ("reset_parameters", "init_weights", "_reset_parameters")


def initialise(module: nn.Module, *, init: Callable[[nn.Module], Any] | None = None) -> nn.Module:
    """Write every parameter and buffer of ``module`` that is still on ``meta``.

    ``init`` is called with every module, children first, instead of the modules' own methods. All
    ranks must have the same random state, and call. Raises ``RunError`` for a tensor that nothing
    wrote, and ``ConfigError`` for a module that is not sharded. Returns ``module``.
    """
    shardings = shardings_in(module)
    if not shardings:
        raise ConfigError("initialise takes a module that fully_shard has sharded; shard it first")
    births = [_Birth(sharding, module) for sharding in shardings]
    with _Writes() as writes, torch.no_grad():
        for child in _children_first(module):
            here = [birth for birth in births if child in birth.modules]
            for birth in here:
                birth.begin()
            (init or _reset)(child)
            for birth in here:
                birth.leave(child, writes)
    return module


class _Birth:
    """One unit's full tensors, from its first module to its last."""

    def __init__(self, sharding: Sharding, top: nn.Module) -> None:
        self.sharding = sharding
        self.modules = _own_modules(sharding)
        self._left = set(self.modules)
        self._names = {child: name for name, child in top.named_modules()}
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

    def leave(self, child: nn.Module, writes: _Writes) -> None:
        """A module has been visited; after the last one, keep the parts of the full tensors."""
        self._left.discard(child)
        if self._left:
            return
        for p, full in self._full.items():
            there = p.places[0].find()
            if there is full and not writes.saw(full):
                raise RunError(self._unwritten(p.places[0].module, p.places[0].attribute))
            assert there is not None
            p.local.copy_(p.own_rows(there.detach()))
            p.written = True
            p.show_sharded()
        for (owner, name), made in self._buffers.items():
            if owner._buffers[name] is made and not writes.saw(made):
                raise RunError(self._unwritten(owner, name))
        self._full.clear()
        for unit in self.sharding.units:
            unit.rewritten()

    def _unwritten(self, owner: nn.Module, attribute: str) -> str:
        prefix = self._names[owner]
        return (
            f"{prefix}.{attribute}".removeprefix(".")
            + " was built on meta, and nothing wrote it: it would hold whatever is in memory. Write"
            " it in its module's reset_parameters, or pass initialise(…, init=function)"
        )

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
        return full


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers every memory that an operation wrote to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._written: dict[int, torch.UntypedStorage] = {}  # held, so that no address comes again

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
                    if isinstance(tensor, Tensor):
                        storage = tensor.untyped_storage()
                        self._written[storage._cdata] = storage
        return func(*args, **kwargs)


def _reset(module: nn.Module) -> None:
    for name in _RESETS:
        method = getattr(module, name, None)
        if callable(method):
            method()
            return


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()

    def walk(one: nn.Module) -> Iterator[nn.Module]:
        if one in seen:
            return
        seen.add(one)
        for child in one.children():
            yield from walk(child)
        yield one

    yield from walk(module)


def _own_modules(sharding: Sharding) -> list[nn.Module]:
    """The modules whose tensors belong to the units of one call."""
    found: list[nn.Module] = []

    def walk(one: nn.Module) -> None:
        if one in found or (sharding_of(one) not in (None, sharding)):
            return
        found.append(one)
        for child in one.children():
            walk(child)

    for module in sharding.modules:
        walk(module)
    return found
