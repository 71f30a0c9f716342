r"""A run of units that can run one cell forward and back.

Forward of slice t builds one autograd graph per segment, detached at its joints, and keeps (input,
output) of each. Backward starts from the gradient of the output and from what the carries of later
slices owe, and leaves the gradient of the input::

    x ─ detach ─> unit … unit ─> y ─ detach ─> next segment, next stage, or loss
    dx <───────── unit … unit <─ dy            and dk̄, dv̄ or a state's gradient through the carries

The last stage computes the loss *and* the gradient of its input in the forward cell, chunk by
chunk, so that no logits outlive it; its backward starts from that gradient.

The stage keeps count of what ran and refuses any other order than slices upward forward and
downward back: exact gradients depend on it.

Shapes: S sequences of this rank, B sequences of one micro-batch, N tokens of a sequence, n of a
slice, C channels.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from terashard.errors import RunError
from terashard.nn.loss import Loss, loss_and_gradient, loss_only
from terashard.nn.protocols import Carry, StageModule, TokenSlice
from terashard.schedule.actions import Backward, Cell, Forward
from terashard.schedule.schedule import Schedule
from terashard.shard.moving import saving_notes
from terashard.shard.pool import BufferPool


class ScaledLoss:
    """A loss times a constant (0-dim), with the chunk size of the loss if it has one."""

    def __init__(self, loss: Loss, scale: Tensor) -> None:
        self._loss, self._scale = loss, scale
        if hasattr(loss, "chunk_tokens"):
            self.chunk_tokens = loss.chunk_tokens

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        """The scaled sum over tokens."""
        summed = self._loss(output, targets)
        return summed * self._scale.to(summed.dtype)


@dataclass(slots=True)
class _MicroState:
    """What one micro-batch has on a stage while a step goes on."""

    tokens: Tensor
    targets: Tensor
    slices: tuple[TokenSlice, ...]
    carries: list[Carry | None]
    graphs: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Input and output of every segment that waits for its backward, by slice and segment."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """By slice: the gradient of the output of the segment that runs back next."""
    joint: Tensor | None = None
    """Output of the segment that ran forward last, input of the next."""
    forward: tuple[int, int] = (0, 0)
    """Slice and segment that must run forward next …"""
    backward: tuple[int, int] | None = None
    """… and backward next."""


class Stage:
    """One stage of a pipeline: its module, and the state of the step that is going on."""

    def __init__(
        self,
        module: StageModule,
        index: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        pool: BufferPool | None = None,
    ) -> None:
        self._pool = pool  # of parameters that move while a graph lives
        units = [unit for _, unit in module.units()]
        self.index, self.device, self.dtype = index, device, dtype
        self.width = module.width
        self.head: nn.Module | None = units.pop() if module.has_head() else None
        self.units: Sequence[nn.Module] = units
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._schedule: Schedule | None = None
        self._micros: list[_MicroState] = []
        self._loss: Loss | None = None

    def begin(self, schedule: Schedule, tokens: Tensor, targets: Tensor, loss: Loss) -> None:
        """Start a step on ``tokens`` and ``targets`` [S, N] under ``loss``."""
        self._schedule, self._loss = schedule, loss
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        partition = schedule.grid.partition
        counts = [micro.sequences for micro in partition]
        rows = torch.split(tokens, counts), torch.split(targets, counts)
        self._micros = [
            _MicroState(x, y, _token_slices(micro.slices), self._new_carries(*x.shape))
            for micro, x, y in zip(partition, *rows, strict=True)
        ]

    def end(self) -> None:
        """Let go of everything that the step held but ``loss_sum``."""
        self._schedule, self._loss, self._micros = None, None, []

    def input_shape(self, cell: Cell) -> tuple[int, int, int]:
        """Shape [B, n, C] of what travels into (and, as a gradient, out of) ``cell``."""
        micro = self._plan.grid.partition[cell.micro]
        return micro.sequences, micro.slices[cell.slice], self.width

    def forward(self, action: Forward, x: Tensor | None) -> Tensor | None:
        """Run one segment on ``x`` [B, n, C], given to the first segment of all stages but stage 0.

        The last segment returns the stage's output [B, n, C], but on the last stage, where the
        loss is added to ``loss_sum``.
        """
        cell, segment, plan = action.cell, action.segment, self._plan
        state, top = self._micros[cell.micro], plan.segments(cell) - 1
        self._advance(state, action, top)
        x = self._input(state, cell, segment, x)
        with torch.set_grad_enabled(plan.training), self._noting():
            y = self._run(self._indices(action), x, state, state.slices[cell.slice])
        if plan.training:
            state.graphs[cell.slice, segment] = x, y
        if segment < top:
            state.joint = y
            return None
        state.joint = None
        if not plan.training and cell.slice == len(state.slices) - 1:
            state.carries.clear()  # no later slice reads them, and no backward
        return self._leave(state, cell, y.detach())

    def backward(self, action: Backward, dy: Tensor | None) -> Tensor | None:
        """Run one segment back from ``dy`` [B, n, C], given to the top one unless the loss made it.

        The first segment of all stages but stage 0 returns the gradient [B, n, C] of its input.
        """
        cell, segment = action.cell, action.segment
        state = self._micros[cell.micro]
        self._retreat(state, action)
        x, y = state.graphs.pop((cell.slice, segment))
        dy = state.gradients.pop(cell.slice, None) if dy is None else dy
        carries = [c for i in self._indices(action) if (c := state.carries[i]) is not None]
        pairs = [(y, dy), *(pair for carry in carries for pair in carry.roots(cell.slice))]
        # What no parameter and no input with a gradient went into, frozen layers say, is no root.
        roots = [(root, gradient) for root, gradient in pairs if root.requires_grad]
        if roots:
            outputs, gradients = zip(*roots, strict=True)
            torch.autograd.backward(outputs, gradients)
        for carry in carries:
            carry.forget(cell.slice)
        return self._hand_back(state, cell, segment, x)

    def _hand_back(self, state: _MicroState, cell: Cell, segment: int, x: Tensor) -> Tensor | None:
        if not x.requires_grad:
            return None
        dx = x.grad if x.grad is not None else torch.zeros_like(x)
        if segment > 0:
            state.gradients[cell.slice] = dx
            return None
        return dx

    def _input(self, state: _MicroState, cell: Cell, segment: int, x: Tensor | None) -> Tensor:
        x = state.joint if segment > 0 else x
        if x is None:
            where = state.slices[cell.slice]
            return state.tokens[:, where.start : where.stop]
        return x.detach().requires_grad_(self._plan.training and x.is_floating_point())

    def _noting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._pool is None else saving_notes(self._pool)

    def _run(self, indices: range, x: Tensor, state: _MicroState, where: TokenSlice) -> Tensor:
        for index in indices:
            x = self.units[index](x, state.carries[index], where)
        return x

    def _leave(self, state: _MicroState, cell: Cell, y: Tensor) -> Tensor | None:
        """The stage's output, or its loss if it is the last stage."""
        if self.index < self._plan.grid.num_stages - 1:
            self._require_output(cell, y)
            return y
        where = state.slices[cell.slice]
        targets = state.targets[:, where.start : where.stop]
        assert self._loss is not None
        if self._plan.training:
            loss, state.gradients[cell.slice] = loss_and_gradient(self.head, y, targets, self._loss)
        else:
            loss = loss_only(self.head, y, targets, self._loss)
        self.loss_sum += loss
        return None

    def _require_output(self, cell: Cell, y: Tensor) -> None:
        """The next stage receives into a buffer of this shape and type: another would be torn."""
        shape = self.input_shape(cell)
        if y.shape != shape or y.dtype != self.dtype:
            raise RunError(
                f"stage {self.index} made {y.dtype} {list(y.shape)} in cell {cell}, but hands on"
                f" {self.dtype} {list(shape)}; correct the module's width, or cast what it returns"
            )

    def _new_carries(self, sequences: int, tokens: int) -> list[Carry | None]:
        made: list[Carry | None] = []
        for unit in self.units:
            new: Any = getattr(unit, "new_carry", None)
            carry = new(sequences, tokens, device=self.device, dtype=self.dtype) if new else None
            made.append(carry)
        return made

    def _indices(self, action: Forward | Backward) -> range:
        """Units of the action's segment, the head left out."""
        bounds = (0, *self._plan.cuts.get(action.cell, ()), len(self.units))
        return range(*bounds[action.segment : action.segment + 2])

    @property
    def _plan(self) -> Schedule:
        if self._schedule is None:
            raise RunError(f"stage {self.index}: no step is going on; call begin first")
        return self._schedule

    def _advance(self, state: _MicroState, action: Forward, top: int) -> None:
        cell, here = action.cell, (action.cell.slice, action.segment)
        if state.forward != here:
            raise RunError(
                f"stage {self.index}: {action} came when slice {state.forward[0]}, segment"
                f" {state.forward[1]} of micro-batch {cell.micro} was due; slices run forward once"
                " each, from first to last"
            )
        ends = action.segment == top
        state.forward = (cell.slice + 1, 0) if ends else (cell.slice, action.segment + 1)
        if ends and cell.slice == len(state.slices) - 1:
            state.backward = here

    def _retreat(self, state: _MicroState, action: Backward) -> None:
        cell, here = action.cell, (action.cell.slice, action.segment)
        if state.backward != here:
            due = (
                "none was due"
                if state.backward is None
                else "slice {}, segment {} was due".format(*state.backward)
            )
            raise RunError(
                f"stage {self.index}: {action} came when {due} in micro-batch {cell.micro};"
                " slices run backward once each, from last to first, after all have run forward"
            )
        if action.segment > 0:
            state.backward = (cell.slice, action.segment - 1)
        elif cell.slice > 0:
            before = Cell(cell.stage, cell.micro, cell.slice - 1)
            state.backward = (before.slice, self._plan.segments(before) - 1)
        else:
            state.backward = None


def _token_slices(lengths: Sequence[int]) -> tuple[TokenSlice, ...]:
    total, start, made = sum(lengths), 0, []
    for index, length in enumerate(lengths):
        made.append(TokenSlice(index=index, start=start, stop=start + length, total=total))
        start += length
    return tuple(made)
