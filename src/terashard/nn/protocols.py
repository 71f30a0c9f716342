r"""What the runtime asks of a model, terashard's own or anyone's.

A *stage* is a run of *units*. A unit is a module that is called once per token slice::

    y = unit(x, carry, where)       x [B, n, C] (tokens [B, n] for the first unit of stage 0)
                                    y [B, n, C]

where ``carry`` holds what earlier slices of the same sequences left for this one, and ``where``
says which tokens these are. A unit in which slices meet makes its carries itself, one for every
micro-batch of B sequences::

    carry = unit.new_carry(B, N, device=device, dtype=dtype)

In a unit without that method, or where it returns None, slices do not meet. Units are also what
sharding gathers and releases together. The last stage may end with a *head*: a unit called as
``head(x)`` together with the loss, inside the forward cell, so that no logits outlive it.

Shapes: B sequences, n tokens of this slice, N tokens of the whole sequence, C channels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSlice:
    """Tokens ``[start, stop)`` of sequences of ``total`` tokens: slice number ``index``.

    ``recompute`` is true when the same slice is run forward a second time, to rebuild its graph
    before its backward.
    """

    index: int
    start: int
    stop: int
    total: int
    recompute: bool = False


@runtime_checkable
class Carry(Protocol):
    """What the slices of one micro-batch leave for later slices in one unit, and the way back."""

    def roots(self, index: int) -> Sequence[tuple[Tensor, Tensor]]:
        """Outputs of slice ``index`` that later slices used, each with the gradient they owe it.

        Called once, right before the backward of slice ``index``, after the backward of every later
        slice. A carry that hands gradients back inside its own autograd function returns nothing.
        """

    def forget(self, index: int) -> None:
        """Slice ``index`` has run backward: whatever was kept for it alone may go."""


@runtime_checkable
class StageModule(Protocol):
    """A consecutive part of a model."""

    width: int
    """Channels C of the tensor handed from stage to stage."""

    def units(self) -> Sequence[tuple[str, nn.Module]]:
        """Global name and module of every unit, in order of use, the head (if any) last.

        A parameter's global name is ``f"{unit}.{name inside the unit}"``; it must not depend on how
        layers are split.
        """

    def has_head(self) -> bool:
        """Whether the last unit is a head, called as ``head(x)`` together with the loss."""

    def ties(self) -> Mapping[str, str]:
        """Global names of parameters here → of those in the first stage that they always equal."""
