r"""Gradients of a few rows: exchanged as (row, value) pairs, kept dense, with the rows remembered.

``nn.Embedding`` and ``nn.EmbeddingBag`` with ``sparse=True`` give a gradient that lists the rows it
touches. It cannot become a DTensor. Every rank sends the pairs to the ranks that keep those rows::

    counts      one sum of a [ranks, ranks] table says how many pairs go where
    pairs       indices and values, point to point
    .grad       zeros but for the rows that any rank touched, divided like every other gradient

``touched_rows`` tells an optimizer that leaves other rows alone which they were. Two such
optimizers are here: ``RowwiseAdagrad``, one accumulator per row (as recommendation models use it),
and ``SparseAdam``, the lazy Adam of torch.optim. Their state is spread as the parameter is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from terashard.comm.group import Group, Work
from terashard.comm.pieces import local_part
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
    """Remember ``rows``; with those of the gradient before, unless it is ``anew``.

    To be called before the gradient is added to: one that is all zeros was cleared in place.
    """
    before = None if anew else getattr(parameter, "_touched", None)
    if before is not None and parameter.grad is not None and local_part(parameter.grad).any():
        rows = torch.unique(torch.cat([before, rows]))
    parameter._touched = rows  # type: ignore[attr-defined]


def _pairs(gradient: Tensor | None, shape: torch.Size, like: Tensor) -> tuple[Tensor, Tensor]:
    if gradient is None:
        none = torch.zeros(0, dtype=torch.int64, device=like.device)
        return none, torch.zeros((0, *shape[1:]), dtype=like.dtype, device=like.device)
    whole = gradient.to(like.dtype).coalesce()  # in this order: rows that stand twice are summed
    return whole.indices()[0], whole.values()


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


@dataclass(frozen=True, slots=True)
class _Rows:
    """What one step changes: some rows of this rank's part of a parameter, and their gradients."""

    parameter: Tensor
    rows: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, parameter: Tensor) -> "_Rows":
        """The rows that the present gradient touches; all if it is dense."""
        assert parameter.grad is not None
        gradient, rows = local_part(parameter.grad), touched_rows(parameter)
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            return cls(parameter, gradient.indices()[0], gradient.values())
        if rows is None:
            rows = torch.arange(len(gradient), device=gradient.device)
        return cls(parameter, rows, gradient[rows])

    def add(self, change: Tensor, alpha: float) -> None:
        """Add ``alpha * change``, one row of it per row, to the parameter."""
        local_part(self.parameter).index_add_(0, self.rows, change, alpha=alpha)


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
                    self._change(_Rows.of(parameter), self.state[parameter], group)
        return loss

    def _change(self, touched: _Rows, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class RowwiseAdagrad(_RowOptimizer):
    r"""Adagrad with one accumulator per row: ``s += mean(g²)``, ``w -= lr · g / (√s + eps)``.

    Works on plain parameters, and on sharded ones that are cut by rows: a rank that has only some
    columns does not know the mean of a row.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, eps: float = 1e-10) -> None:
        super().__init__(params, lr=lr, eps=eps)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take more parameters. Raises ``ConfigError`` for one that is not cut by rows."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            _require_whole_rows(parameter)

    def _change(self, touched: _Rows, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "sum" not in state:
            state["sum"] = _zero_per_row(touched.parameter)
        sums, gradient = local_part(state["sum"]), touched.gradient
        sums.index_add_(0, touched.rows, gradient.square().unsqueeze(-1).flatten(1).mean(dim=1))
        scale = sums[touched.rows].sqrt() + group["eps"]
        touched.add(gradient / scale.view(-1, *[1] * (gradient.dim() - 1)), -group["lr"])


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

    def _change(self, touched: _Rows, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            for name in ("mean", "square"):
                state[name] = torch.zeros_like(touched.parameter, requires_grad=False)
            state["step"] = 0
        state["step"] += 1
        (first, second), rows, gradient = group["betas"], touched.rows, touched.gradient
        mean = _move(state["mean"], rows, gradient, 1 - first)
        square = _move(state["square"], rows, gradient.square(), 1 - second)
        correction = (1 - second ** state["step"]) ** 0.5 / (1 - first ** state["step"])
        touched.add(mean / (square.sqrt() + group["eps"]), -group["lr"] * correction)


def _move(moments: Tensor, rows: Tensor, towards: Tensor, weight: float) -> Tensor:
    """Move ``rows`` of ``moments`` a part of the way; what they are now."""
    moved = local_part(moments)[rows].lerp(towards, weight)
    local_part(moments)[rows] = moved
    return moved


def _zero_per_row(parameter: Tensor) -> Tensor:
    zeros = local_part(parameter).new_zeros(len(local_part(parameter)))
    if not isinstance(parameter, DTensor):
        return zeros
    return DTensor.from_local(
        zeros,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape[:1],
        stride=(1,),
    )


def _require_whole_rows(parameter: Tensor) -> None:
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    if not parameter.dim() or any(getattr(p, "dim", 0) for p in placements):
        where = f" placed {tuple(placements)}" if placements else ""
        raise ConfigError(
            f"a parameter of shape {tuple(parameter.shape)}{where} has no whole rows on this rank;"
            " RowwiseAdagrad takes those that are cut along dim 0 or not at all"
        )
