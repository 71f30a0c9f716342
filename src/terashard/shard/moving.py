"""Parameters whose slot changes while a graph lives: autograd keeps notes, not views.

Around every forward that reads such parameters, saved-tensor hooks replace each saved view of the
unit's memory by (unit, generation, geometry)::

    forward      F.linear saves weight.t() ── pack ──> (unit, generation, bytes 0.., shape, strides)
    ···          the slot serves other units; the unit is gathered again, somewhere else
    backward     reads the saved tensor ── unpack ──> that geometry in the unit's present slot

Unpacking raises if the unit is not full or its values have changed. All other tensors are handed to
the hooks that were in force before (activation checkpointing sets some), as if these did not exist.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from terashard.errors import RunError
from terashard.shard.pool import BufferPool, Lease, Slot

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class MovingLease(Lease):
    """One unit's use of one slot after the other."""

    def move(self, slot: Slot) -> None:
        """Use ``slot`` from the next ``take`` on; the unit must not be in another one."""
        if self.slot.holder is self:
            raise RunError(
                f"unit {self.owner} is in {self.slot.label} and cannot move; release it first"
            )
        if slot is not self.slot:
            self.slot, self._view = slot, None


@dataclass(frozen=True, slots=True)
class _Note:
    """A tensor over a unit's memory: ``offset`` counts elements from the unit's first byte."""

    lease: Lease
    generation: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def read(self) -> Tensor:
        """The same tensor in the slot where the unit is now."""
        lease = self.lease
        if not lease.is_open:
            raise RunError(
                f"a backward pass reads the parameters of unit {lease.owner}, which is not full"
                " then; gather it before the backward that needs it"
            )
        if lease.generation != self.generation:
            raise RunError(
                f"a backward pass reads parameters of unit {lease.owner} that were modified by an"
                " inplace operation since its forward pass; run the forward pass again"
            )
        storage = lease.slot.flat().untyped_storage()
        empty = torch.empty(0, dtype=self.dtype, device=lease.slot.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


def saving_notes(pool: BufferPool) -> AbstractContextManager[None]:
    """While open, what autograd saves of the pool's slots is saved as notes."""
    return saved_tensors_hooks(*_note_hooks(pool))


@contextmanager
def noting(pool: BufferPool) -> Iterator[None]:
    """``saving_notes``, unless these hooks are the ones in force already."""
    present = _present_hooks()[0]
    if getattr(present, "notes_of", None) is pool:
        yield
    else:
        with saving_notes(pool):
            yield


def _note_hooks(pool: BufferPool) -> tuple[Pack, Unpack]:
    outer_pack, outer_unpack = _present_hooks()

    def pack(tensor: Tensor) -> Any:
        slot = (
            pool.by_storage.get(tensor.untyped_storage()._cdata) if type(tensor) in _PLAIN else None
        )
        if slot is None or slot.holder is None:
            return outer_pack(tensor)
        lease, at = slot.holder, int(tensor.storage_offset())
        return _Note(lease, lease.generation, tensor.dtype, tensor.shape, tensor.stride(), at)

    pack.notes_of = pool  # type: ignore[attr-defined]

    def unpack(saved: Any) -> Tensor:
        return saved.read() if isinstance(saved, _Note) else outer_unpack(saved)

    return pack, unpack


_PLAIN = (Tensor, torch.nn.Parameter)


def _present_hooks() -> tuple[Pack, Unpack]:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks if hooks is not None else (_same, _same)


def _same(value: Any) -> Any:
    return value
