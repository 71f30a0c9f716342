"""The full leaves of a unit, and the graphs that lead to them: does any live, what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from terashard.shard.param import ShardedParameter

if TYPE_CHECKING:
    from terashard.shard.module_unit import ModuleUnit


class Use:
    """One forward pass of a unit's module whose backward may still come."""

    __slots__ = ("__weakref__", "is_reached")

    def __init__(self) -> None:
        self.is_reached = False
        """Whether a backward pass has come to it."""


def watch(p: ShardedParameter, unit: ModuleUnit) -> None:
    """Note in ``unit.arrived`` when the gradient of ``p`` is complete in a backward pass."""

    def note(leaf: Tensor) -> None:
        if leaf is not p.full:
            hand_over(leaf, p.full)
        unit.arrived.add(p)
        unit.on_arrival()

    p.full.requires_grad_(True)  # a frozen leaf takes no hooks
    p.full.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
    p.full.requires_grad_(p.trainable)


def hand_over(leaf: Tensor, heir: Tensor) -> None:
    """Move the gradient of a leaf that stands nowhere any more to the one that took its place."""
    gradient, leaf.grad = leaf.grad, None
    if gradient is not None:
        heir.grad = gradient if heir.grad is None else heir.grad + gradient
