"""Slots for units that move: the free one of the right size, or a new one.

The list of a step says when units come and go, so the same slots are taken at the same times in
every step, and after the first no memory is asked for.
"""

import torch

from terashard.shard.pool import BufferPool, Slot
from terashard.shard.residence import Residence


class Places:
    """The slots of one device, by size."""

    def __init__(self, device: torch.device) -> None:
        self.pool = BufferPool(device)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots that were ever needed."""
        return sum(slot.nbytes for slot in self.pool.slots.values())

    def free(self, unit: Residence) -> Slot:
        """A slot of the size of ``unit`` that nobody holds, the first of them."""
        for slot in self.pool.slots.values():
            if slot.nbytes == unit.full_bytes and slot.holder is None:
                return slot
        made = self.pool.spare()
        made.reserve(unit.full_bytes)
        return made
