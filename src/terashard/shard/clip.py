r"""The gradient norm over every axis of the mesh, and scaling by it.

``‖g‖² = Σ over stages and shards of the squares of the rows there``. A weight that two stages share
has the same gradient on both and counts on one of them; a 0-dim parameter is kept by every shard
and counts on shard 0; replicas hold the same gradients and only replica 0 contributes. The caller
sums over the world, and decides what a norm that is not finite means.

Works on the plain rows: clipping DTensor by DTensor needs a backend, and clipping local tensors one
by one is wrong.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from terashard.shard.unit import ShardUnit

_BLOCK = 512
"""Elements that are summed in the gradients' own format; the blocks are summed in float64.

As fast as a plain float32 norm, but its error does not grow with the length.
"""


def squared_norm(units: Sequence[ShardUnit], *, count_ties: bool) -> Tensor:
    """Sum of squares of this rank's reduced gradient rows, 0-dim float64.

    ``count_ties`` is true on one of the two stages that share a weight.
    """
    device = units[0].axes.device if units else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for unit in units:
        for rows in _counted(unit, count_ties):
            total += _square(rows)
    return total


def scale_gradients(units: Sequence[ShardUnit], factor: float | Tensor) -> None:
    """Multiply this rank's reduced gradient rows by ``factor``, a number or a 0-dim tensor."""
    for unit in units:
        if unit.gradients is not None:
            unit.gradients.flat_rows.mul_(factor)


def _counted(unit: ShardUnit, count_ties: bool) -> Iterator[Tensor]:
    if unit.gradients is None:
        return
    first = unit.axes.shard == 0
    parts = zip(unit.gradients.parameters, unit.gradients.rows, strict=True)
    for parameter, rows in parts:
        if (first or not parameter.is_scalar) and (count_ties or parameter.tied_to is None):
            yield rows


def _square(rows: Tensor) -> Tensor:
    flat = rows.reshape(-1)
    whole = flat.numel() // _BLOCK * _BLOCK
    norms: Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), dim=1)
    rest: Tensor = torch.linalg.vector_norm(flat[whole:])
    return norms.double().square().sum() + rest.double().square()
