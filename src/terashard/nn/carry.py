r"""What one token slice leaves for the next, and the gradient that comes back.

Attention leaves keys and values. Slice ``t`` covers tokens ``[p_t, p_t + n_t)`` and attends to rows
``[0, p_t + n_t)`` of one buffer. Later slices owe slice ``t``

    k̄_t = Σ_{u>t} ∂L_u/∂k_t        (and v̄_t alike),

which is summed here while the slices run backward from last to first, and handed over when slice
``t`` does.

A recurrent layer leaves a state: an output of slice ``t`` that only slice ``t + 1`` reads. It
crosses the cut as a detached leaf, whose gradient becomes one more root of slice ``t``'s backward.

Shapes: B sequences, H_kv key/value heads, N tokens of the whole sequence, n of this slice, D head
width.
Source: TeraPipe (arXiv:2102.07988).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from terashard.errors import RunError
from terashard.nn.protocols import TokenSlice


class KeyValueCarry:
    """Keys and values of one micro-batch in one layer, written in place slice by slice.

    ``shape`` is (B, H_kv, N, D). Nothing is allocated before the first write: a slice that is the
    whole sequence needs no carry. Gradients are summed in the wider of float32 and ``dtype``.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._shape = shape
        self._device = device
        self._dtype = dtype
        self._filled = 0
        self._rows: tuple[Tensor, Tensor] | None = None
        self._owed: tuple[Tensor, Tensor] | None = None

    def write(self, where: TokenSlice, key: Tensor, value: Tensor) -> None:
        """Put one slice's keys and values [B, H_kv, n, D] into their rows."""
        known = where.stop <= self._filled if where.recompute else where.start == self._filled
        if not known:
            raise RunError(
                f"slice {where.index} is tokens [{where.start}, {where.stop}), but {self._filled}"
                " tokens of this sequence ran forward so far; its slices run in order, each once:"
                " do not put attention under torch.utils.checkpoint"
            )
        if self._rows is None:
            self._rows = self._empty(), self._empty()
        for rows, new in zip(self._rows, (key, value), strict=True):
            rows[:, :, where.start : where.stop] = new
        self._filled = max(self._filled, where.stop)

    def read(self, stop: int) -> tuple[Tensor, Tensor]:
        """Views [B, H_kv, stop, D] of the keys and values of tokens ``[0, stop)``."""
        if self._rows is None:
            raise RunError(
                "keys and values were read after slice 0 ran backward; run the slices forward again"
            )
        key, value = self._rows
        return key[:, :, :stop], value[:, :, :stop]

    def owe(self, key: Tensor, value: Tensor) -> None:
        """Add what one slice owes the p tokens before it: gradients [B, H_kv, p, D], for keeps."""
        if self._owed is None:
            # The last slice comes first and has the longest prefix: its gradients are the first
            # value of the sum.
            wide = torch.promote_types(self._dtype, torch.float32)
            self._owed = key.to(wide), value.to(wide)
            return
        for owed, new in zip(self._owed, (key, value), strict=True):
            owed[:, :, : new.shape[2]] += new

    def settle(self, where: TokenSlice, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add to a slice's own gradients [B, H_kv, n, D], in place, what later slices owe it."""
        if self._owed is not None:
            for own, owed in zip((key, value), self._owed, strict=True):
                own += owed[:, :, where.start : where.stop]
        if where.start == 0:
            self._owed = None
        return key, value

    def roots(self, index: int) -> Sequence[tuple[Tensor, Tensor]]:
        """Nothing: attention's own autograd function hands the gradients back."""
        return ()

    def forget(self, index: int) -> None:
        """After slice 0 nobody reads keys, values or sums again."""
        if index == 0:
            self._rows = self._owed = None
            self._filled = 0

    def _empty(self) -> Tensor:
        return torch.empty(self._shape, device=self._device, dtype=self._dtype)


class StateCarry:
    """Named tensors that slice t hands to slice t + 1: the carry for a recurrent layer of your own.

    In the forward of a unit::

        state = carry.take(where)            # None in the first slice
        …
        carry.put(where, new_state)

    A unit may run under ``torch.utils.checkpoint`` with ``use_reentrant=False``. The reentrant form
    runs forward without a graph, so a state put there could not be handed its gradient: refused.
    """

    def __init__(self) -> None:
        self._outputs: dict[int, dict[str, Tensor]] = {}
        self._leaves: dict[int, dict[str, Tensor]] = {}
        self._ungraphed: set[tuple[int, str]] = set()

    def put(self, where: TokenSlice, tensor: Tensor, name: str = "state") -> None:
        """Leave ``tensor`` for the next slice; a recomputation puts it again."""
        self._outputs.setdefault(where.index, {})[name] = tensor
        if torch.is_grad_enabled():
            self._ungraphed.discard((where.index, name))
        else:
            self._ungraphed.add((where.index, name))

    def take(self, where: TokenSlice, name: str = "state") -> Tensor | None:
        """What the slice before left under ``name``, as a leaf; None in the first slice.

        A second call in the same slice, or in its recomputation, returns the same leaf: its
        gradient is the sum over all uses. Of a type that has no gradients it is a plain tensor.
        """
        if where.index == 0:
            return None
        leaves = self._leaves.setdefault(where.index, {})
        if name in leaves:
            return leaves[name]
        try:
            left = self._outputs[where.index - 1][name]
        except KeyError:
            raise RunError(
                f"slice {where.index} takes {name!r}, which slice {where.index - 1} did not put;"
                " every slice must put what the next one takes"
            ) from None
        leaves[name] = left.detach().requires_grad_(left.is_floating_point() or left.is_complex())
        return leaves[name]

    def roots(self, index: int) -> Sequence[tuple[Tensor, Tensor]]:
        """What slice ``index`` left, each with the gradient that slice ``index + 1`` owes it."""
        outputs, leaves = self._outputs.get(index, {}), self._leaves.get(index + 1, {})
        owed = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        for name in owed:
            if (index, name) in self._ungraphed:
                raise RunError(
                    f"slice {index} put {name!r} while gradients were off, and slice {index + 1}"
                    " owes it one; use checkpoint with use_reentrant=False, or put it with"
                    " gradients on (detached, if it shall have none)"
                )
        return [(outputs[name], gradient) for name, gradient in owed.items()]

    def forget(self, index: int) -> None:
        """Drop what slice ``index`` left, and the next slice's leaves of it."""
        for name in self._outputs.pop(index, {}):
            self._ungraphed.discard((index, name))
        self._leaves.pop(index + 1, None)
