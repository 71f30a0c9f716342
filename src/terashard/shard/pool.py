r"""Full-size buffers that are reused for ever, and what keeps autograd from reading a stale one.

Autograd saves a weight in the forward pass and reads it in the backward pass. If its buffer holds
another unit's parameters by then, the gradient is silently wrong. The contract of this file:
*autograd never reads a stale parameter; a stale read raises*. There are three forms.

*Static*: a unit always uses the same slot, so what autograd saved points at the right place again
once the slot is refilled::

    BufferPool ──slot(0)──> Slot ── flat ─────────── one storage, allocated at first use
                             │
                             ├── Lease of unit a ── flat.data   version counter of a's parameters
                             └── Lease of unit b ── flat.data   version counter of b's parameters

A lease's version is even while its content may be read and odd while it may not. It is the same
even number after every refill with the same values (same *generation*), and a greater one once the
values may have changed. Autograd compares the number at backward with the one it saw at forward,
and raises if they differ.

*Moving* (``moving.py``): a unit may be gathered into another slot while a graph lives. Autograd
then keeps no view but a note of where in the unit it was.

*Own storage*: a slot of one unit alone, whose memory goes back to the allocator at every release.
It serves autograd functions that keep parameters where no saved-tensor hook sees them.

Where memory is short at one point of a step (the last sums of a backward pass), a slot that nobody
needs there may be *freed*: same storage, no memory, until the next unit comes.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from terashard.errors import RunError


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """One buffer, at the disposal of one unit at a time."""

    label: str
    device: torch.device
    nbytes: int = 0
    holder: "Lease | None" = None
    is_own: bool = False
    """Whether the memory goes back at every release, because one unit alone ever uses it."""
    _flat: Tensor | None = field(default=None, repr=False)
    _known: "dict[int, Slot] | None" = field(default=None, repr=False)

    @classmethod
    def over(cls, flat: Tensor, label: str) -> "Slot":
        """A slot whose buffer exists already and belongs to somebody else."""
        return cls(label=label, device=flat.device, nbytes=flat.nbytes, _flat=flat)

    def reserve(self, nbytes: int) -> None:
        """Make the buffer at least ``nbytes`` long; only before its first use."""
        if self._flat is not None and nbytes > self._flat.nbytes:
            raise RunError(
                f"{self.label} is in use with {self._flat.nbytes} bytes, not {nbytes};"
                " reserve the longest unit before the first gather"
            )
        self.nbytes = max(self.nbytes, nbytes)

    def grow(self, nbytes: int) -> None:
        """Make the buffer long enough, with another memory if need be; nobody may be there."""
        if nbytes > self.nbytes or self.is_own:
            if self._flat is not None and self._known is not None:
                del self._known[self._flat.untyped_storage()._cdata]
            self.nbytes, self._flat = nbytes, None

    def flat(self) -> Tensor:
        """The buffer, bytes, allocated at the first call."""
        if self._flat is None:
            # Tensors born in inference mode can never take part in a later training step.
            with torch.inference_mode(False):
                self._flat = torch.zeros(self.nbytes, device=self.device, dtype=torch.uint8)
            if self._known is not None:
                self._known[self._flat.untyped_storage()._cdata] = self
        return self._flat

    def take(self, lease: "Lease") -> None:
        """Hand the slot to a lease; refused while another unit is there."""
        if self.holder is not None:
            raise RunError(
                f"unit {lease.owner} needs {self.label}, which unit {self.holder.owner} holds;"
                f" release {self.holder.owner} first, or give the two units different slots"
            )
        self.holder = lease
        self.restore()

    def give_back(self) -> None:
        """End the present holder's use."""
        self.holder = None
        if self.is_own:
            self.free()

    def restore(self) -> None:
        """Have memory, also if it was given back."""
        storage = self.flat().untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.nbytes)

    def free(self) -> None:
        """Give the memory back to the allocator until somebody is here again."""
        if self._flat is not None:
            self._flat.untyped_storage().resize_(0)


class BufferPool:
    """The slots of one device, by number."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slots: dict[int, Slot] = {}
        self.by_storage: dict[int, Slot] = {}
        """The slots that have memory, by its storage."""

    def slot(self, number: int) -> Slot:
        """Slot ``number``, made at the first call."""
        if number not in self.slots:
            self.slots[number] = Slot(
                label=f"slot {number}", device=self.device, _known=self.by_storage
            )
        return self.slots[number]

    def spare(self) -> Slot:
        """A slot that nobody has used yet."""
        return self.slot(len(self.slots))


class Lease:
    """One unit's use of one slot, seen by autograd through a version counter of its own."""

    def __init__(self, slot: Slot, owner: str) -> None:
        self.slot = slot
        self.owner = owner
        self.generation = 0
        self.is_open = False
        self._view: Tensor | None = None

    @property
    def view(self) -> Tensor:
        """The slot's flat buffer under this lease's version counter; parameters are cut from it."""
        if self._view is None:
            with torch.inference_mode(False):
                # `.data`, unlike `.detach()`, starts a version counter of its own.
                self._view = self.slot.flat().data
        return self._view

    def renew(self) -> None:
        """Begin a generation: the values differ, so graphs of the last one must not be run."""
        self.generation += 1
        if self.is_open:
            self.open()

    def take(self) -> None:
        """Claim the slot; its content may not be read yet."""
        self.slot.take(self)

    def open(self) -> None:
        """Declare that the slot now holds this unit's parameters of the present generation."""
        self.is_open = True
        self._set_version(2 * self.generation + 2)

    def close(self) -> None:
        """Declare the content unreadable, and give the slot back."""
        self.is_open = False
        self._set_version(2 * self.generation + 3)
        self.slot.give_back()

    def _set_version(self, version: int) -> None:
        torch._C._autograd._unsafe_set_version_counter((self.view,), (version,))
