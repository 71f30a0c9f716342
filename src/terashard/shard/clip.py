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

_BLOCK = 1 << 15
"""Elements that are widened at a time: a float64 copy of a block stays in the cache."""


def squared_norm(units: Sequence[ShardUnit], *, count_ties: bool) -> Tensor:
    """Sum of squares of this rank's reduced gradient rows, 0-dim float64.

    ``count_ties`` is true on one of the two stages that share a weight.
    """
    device = units[0].mesh.device if units else torch.device("cpu")
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
    first = unit.mesh.coordinates.shard == 0
    parts = zip(unit.gradients.parameters, unit.gradients.rows, strict=True)
    for parameter, rows in parts:
        if (first or not parameter.is_scalar) and (count_ties or parameter.tied_to is None):
            yield rows


def _square(rows: Tensor) -> Tensor:
    if rows.device.type != "cpu":
        norm: Tensor = torch.linalg.vector_norm(rows, dtype=torch.float64)
        return norm.square()
    # Widening block by block is six times as fast here as a norm with a wider dtype.
    total = torch.zeros((), dtype=torch.float64)
    for block in torch.split(rows.reshape(-1), _BLOCK):
        wide = block.double()
        total += torch.dot(wide, wide)
    return total
