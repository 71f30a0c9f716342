r"""Gradients of a few rows: exchanged as (row, value) pairs, kept dense, with the rows remembered.

``nn.Embedding`` and ``nn.EmbeddingBag`` with ``sparse=True`` give a gradient that lists the rows it
touches. It cannot become a DTensor. Every rank sends the pairs to the ranks that keep those rows::

    counts      one sum of a [ranks, ranks] table says how many pairs go where
    pairs       indices and values, point to point
    .grad       zeros but for the rows that any rank touched, divided like every other gradient

``touched_rows`` tells an optimizer that leaves other rows alone which they were. Two such
optimizers are here, for parameters that are cut by rows: ``RowwiseAdagrad``, one accumulator per
row (as recommendation models use it), and ``SparseAdam``, the lazy Adam of torch.optim.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from terashard.comm.group import Group, Work
from terashard.comm.rows import row_range
from terashard.errors import ConfigError

_INDEX_TAG, _VALUE_TAG = 2**29, 2**29 + 1


def gives_sparse_gradient(module: nn.Module) -> bool:
    """Whether the weight of ``module`` gets its gradient as rows."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse


def exchange_rows(
    gradient: Tensor | None, shape: torch.Size, like: Tensor, group: Group
) -> tuple[Tensor, Tensor]:
    """Sum of all ranks' sparse gradients over this rank's rows: (rows, ascending; their values).

    ``gradient`` is a sparse tensor of the full ``shape``, or None. Collective over ``group``.
    """
    indices, values = _pairs(gradient, shape, like)
    ranges = [row_range(shape[0], group.size, member) for member in range(group.size)]
    chosen = [(indices >= start) & (indices < stop) for start, stop in ranges]
    arrived = _exchanged([(indices[pick], values[pick]) for pick in chosen], group)
    came = torch.cat([index for index, _ in arrived]) - ranges[group.rank][0]
    rows, place = torch.unique(came, return_inverse=True)
    summed = like.new_zeros((len(rows), *shape[1:]))
    summed.index_add_(0, place, torch.cat([value for _, value in arrived]))
    return rows, summed


def touched_rows(parameter: Tensor) -> Tensor | None:
    """This rank's rows that the present gradient touches, int64; None if it is not of that kind."""
    found: Tensor | None = getattr(parameter, "_touched", None)
    return None if parameter.grad is None else found


def touch(parameter: Tensor, rows: Tensor, *, anew: bool) -> None:
    """Remember ``rows``; with those of the gradient before, unless it is ``anew``."""
    before = None if anew else getattr(parameter, "_touched", None)
    if before is not None:
        rows = torch.unique(torch.cat([before, rows]))
    parameter._touched = rows  # type: ignore[attr-defined]


def _pairs(gradient: Tensor | None, shape: torch.Size, like: Tensor) -> tuple[Tensor, Tensor]:
    if gradient is None:
        none = torch.zeros(0, dtype=torch.int64, device=like.device)
        return none, torch.zeros((0, *shape[1:]), dtype=like.dtype, device=like.device)
    whole = gradient.coalesce()
    return whole.indices()[0], whole.values().to(like.dtype)


def _exchanged(pieces: list[tuple[Tensor, Tensor]], group: Group) -> list[tuple[Tensor, Tensor]]:
    """Piece k goes to member k; the pieces that came, by member."""
    table = torch.zeros(group.size, group.size, dtype=torch.int64, device=pieces[0][0].device)
    for peer, (index, _) in enumerate(pieces):
        table[group.rank, peer] = len(index)
    group.sum(table).wait()
    arrived = list(pieces)
    works: list[Work] = []
    for peer in _others(group):
        count = int(table[peer, group.rank])
        index, value = pieces[peer]
        arrived[peer] = (index.new_empty(count), value.new_empty((count, *value.shape[1:])))
        if count:
            works.append(group.receive(arrived[peer][0], peer, _INDEX_TAG))
            works.append(group.receive(arrived[peer][1], peer, _VALUE_TAG))
    for peer in _others(group):
        index, value = pieces[peer]
        if len(index):
            works.append(group.send(index.contiguous(), peer, _INDEX_TAG))
            works.append(group.send(value.contiguous(), peer, _VALUE_TAG))
    for work in works:
        work.wait()
    return arrived


def _others(group: Group) -> list[int]:
    return [(group.rank + step) % group.size for step in range(1, group.size)]


class _RowOptimizer(torch.optim.Optimizer):
    """Steps on the touched rows of this rank's part of every parameter."""

    def __init__(self, params: Iterable[Any], **defaults: Any) -> None:
        if defaults["lr"] <= 0:
            raise ConfigError(f"lr = {defaults['lr']} is no learning rate; it must be positive")
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Change the rows that the present gradients touch; all rows if a gradient is dense."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._change(parameter, group)
        return loss

    def _change(self, parameter: Tensor, group: dict[str, Any]) -> None:
        values, gradient = _local(parameter), _local(parameter.grad)
        rows = touched_rows(parameter)
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            rows, taken = gradient.indices()[0], gradient.values()
        else:
            rows = torch.arange(len(values), device=values.device) if rows is None else rows
            taken = gradient[rows]
        self._step_rows(self.state[parameter], values, rows, taken, group)

    def _step_rows(
        self,
        state: dict[str, Any],
        values: Tensor,
        rows: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
    ) -> None:
        raise NotImplementedError


class RowwiseAdagrad(_RowOptimizer):
    r"""Adagrad with one accumulator per row: ``s += mean(g²)``, ``w -= lr · g / (√s + eps)``.

    Works on sharded parameters that are cut by rows, and on plain ones.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, eps: float = 1e-10) -> None:
        super().__init__(params, lr=lr, eps=eps)

    def _step_rows(
        self,
        state: dict[str, Any],
        values: Tensor,
        rows: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
    ) -> None:
        if "sum" not in state:
            state["sum"] = values.new_zeros(len(values))
        squares = gradient.square().flatten(1).mean(dim=1)
        state["sum"].index_add_(0, rows, squares)
        scale = group["lr"] / (state["sum"][rows].sqrt() + group["eps"])
        shape = (-1, *[1] * (values.dim() - 1))
        values.index_add_(0, rows, gradient * scale.view(shape), alpha=-1)


class SparseAdam(_RowOptimizer):
    """Adam whose moments move for touched rows only, as ``torch.optim.SparseAdam``'s do."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps)

    def _step_rows(
        self,
        state: dict[str, Any],
        values: Tensor,
        rows: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
    ) -> None:
        if not state:
            state |= {
                "step": 0,
                "mean": torch.zeros_like(values),
                "square": torch.zeros_like(values),
            }
        state["step"] += 1
        first, second = group["betas"]
        for name, beta, value in (("mean", first, gradient), ("square", second, gradient.square())):
            state[name][rows] = state[name][rows].lerp(value, 1 - beta)
        correction = (1 - second ** state["step"]) ** 0.5 / (1 - first ** state["step"])
        change = state["mean"][rows] / (state["square"][rows].sqrt() + group["eps"])
        values.index_add_(0, rows, change, alpha=-group["lr"] * correction)


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
