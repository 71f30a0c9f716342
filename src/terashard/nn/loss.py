r"""Cross-entropy in chunks of tokens, so that no logits outlive a chunk.

With logits ``a`` (capped first: ``a ← cap · tanh(a / cap)``), ``z = log Σ_w e^{a_w}``, target ``y``
and smoothing ε, one token's loss is

    (1 − ε)(z − a_y) + ε (z − mean_w a_w) + ζ z²,

and its gradient ``(1 + 2ζz) softmax(a) − (1 − ε) 1_y − ε / V``, times ``1 − (a / cap)²`` under a
cap. It is computed in the forward, in the buffer that held the log-probabilities: besides the
logits themselves one buffer of their size exists, two under a cap.

The last stage calls head and loss on a chunk of hidden states and runs the backward at once, before
the next chunk.

Shapes: B sequences, n tokens of the slice, T tokens of a chunk, C channels, V words.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from terashard.config.schema import LossConfig
from terashard.nn.embedding import check_ids

Loss = Callable[[Tensor, Tensor], Tensor]
"""(output of one slice, its targets) → 0-dim sum over tokens."""
Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy(LossConfig):
    """The *sum* over tokens of the cross-entropy; who sums over slices and ranks divides once.

    Its fields, and what is allowed in them, are those of ``LossConfig``.
    """

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Logits [..., V] and targets [...] to a 0-dim sum: float32, or float64 for such logits."""
        rows, flat = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
        kept = flat != self.ignore_index
        labels = flat.where(kept, 0)
        check_ids(labels, rows.shape[-1])
        return cast(Tensor, _CrossEntropy.apply(rows, labels, kept, self))  # type: ignore[no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, kept: Tensor, how: CrossEntropy
    ) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        capped = logits
        if how.soft_cap is not None:
            capped = (logits.to(wide) / how.soft_cap).tanh_().mul_(how.soft_cap)
        at, dropped = labels.unsqueeze(-1), ~kept.unsqueeze(-1)  # [T, 1]
        log_p = capped.log_softmax(-1, dtype=wide)
        picked = log_p.gather(-1, at)
        z = capped.gather(-1, at) - picked
        loss = picked * (how.label_smoothing - 1)
        if how.label_smoothing:
            loss -= how.label_smoothing * log_p.mean(-1, keepdim=True)
        if how.z_loss:
            loss += how.z_loss * z.square()
        if ctx.needs_input_grad[0]:
            gradient = _gradient_(log_p, at, z, how)
            if how.soft_cap is not None:
                gradient.addcmul_(gradient, capped.div_(how.soft_cap).square_(), value=-1)
            ctx.save_for_backward(gradient.masked_fill_(dropped, 0).to(logits.dtype))
        return loss.masked_fill_(dropped, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None, None, None


def _gradient_(log_p: Tensor, at: Tensor, z: Tensor, how: CrossEntropy) -> Tensor:
    """Turn log-probabilities [T, V] into the gradient of the capped logits, in place."""
    gradient = log_p.exp_()
    if how.z_loss:
        gradient *= 1 + 2 * how.z_loss * z
    if how.label_smoothing:
        gradient -= how.label_smoothing / gradient.shape[-1]
    target = gradient.new_full((1, 1), how.label_smoothing - 1).expand_as(at)
    return gradient.scatter_add_(-1, at, target)


def loss_and_gradient(
    head: Head | None, hidden: Tensor, targets: Tensor, loss: Loss
) -> tuple[Tensor, Tensor]:
    """Loss sum (0-dim, detached) and its gradient with respect to ``hidden`` [B, n, C].

    Gradients of the head's parameters are added to their ``grad``. ``hidden`` is cut into chunks of
    ``loss.chunk_tokens`` tokens, [T, C] each; a loss without that attribute is called once, on all
    of it. Without a head the loss is applied to ``hidden`` itself.
    """
    gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    total: Tensor | None = None
    for piece, labels, rows in _chunks(hidden.detach(), targets, gradient, loss):
        leaf = piece.detach().requires_grad_()
        with torch.enable_grad():
            value = loss(leaf if head is None else head(leaf), labels)
        value.backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        rows.copy_(leaf.grad)
        total = value.detach() if total is None else total + value.detach()
    assert total is not None
    return total, gradient


def loss_only(head: Head | None, hidden: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """Loss sum (0-dim) alone, without any gradient, in the same chunks."""
    total: Tensor | None = None
    with torch.no_grad():
        for piece, labels, _ in _chunks(hidden.detach(), targets, hidden, loss):
            value = loss(piece if head is None else head(piece), labels)
            total = value if total is None else total + value
    assert total is not None
    return total


def _chunks(
    hidden: Tensor, targets: Tensor, gradient: Tensor, loss: Loss
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    size = getattr(loss, "chunk_tokens", None)
    if size is None:
        yield hidden, targets, gradient
        return
    flat = (hidden.flatten(0, 1), targets.reshape(-1), gradient.flatten(0, 1))
    yield from zip(*(torch.split(x, size) for x in flat), strict=True)
