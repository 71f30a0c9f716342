r"""What every group does to tensors: rows by member, sums in rank order, and refusals.

With W members and ``x_w`` the tensor of member w, a sum is ``((x_0 + x_1) + x_2) + …`` in the
wider of float32 and the tensors' own type (integers in their own), rounded once at the end. So it
depends on nothing but the values.

Communication writes through ``Tensor.data``: a received value does not count as an in-place
change, because a buffer that is filled again with what autograd saved from it is still right
(``shard.pool`` watches over the rest).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from terashard.comm.rows import row_range
from terashard.errors import CommunicationError


class Done:
    """A ``Work`` that was finished when it was made."""

    def wait(self, timeout: float | None = None) -> None:
        """Return at once."""


def rows_of(tensor: Tensor, members: int, member: int) -> Tensor:
    """View of the rows of ``tensor`` that belong to ``member`` of ``members``, outside autograd."""
    start, stop = row_range(tensor.shape[0], members, member)
    return tensor.data[start:stop]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which tensors of ``dtype`` are summed."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.promote_types(dtype, torch.float32)
    return dtype


def sum_in_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """``out`` becomes the sum of ``parts``, first to last; it may be one of the first two."""
    wide, target = wide_dtype(parts[0].dtype), out.data
    if len(parts) > 1 and parts[0].dtype == wide == target.dtype:
        torch.add(parts[0].data, parts[1].data, out=target)
        total, rest = target, parts[2:]
    else:
        total = parts[0].data.to(wide, copy=True)
        rest = parts[1:]
    for part in rest:
        total.add_(part.data)
    if total is not target:
        target.copy_(total)


def require_contiguous(tensor: Tensor, what: str) -> None:
    """Refuse a tensor whose elements do not lie one after another."""
    if not tensor.is_contiguous():
        raise CommunicationError(
            f"{what}: a tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()};"
            " only contiguous tensors travel: call .contiguous() first"
        )


def require_peer(peer: int, rank: int, size: int, what: str) -> None:
    """Refuse a position that is not another member's."""
    if not 0 <= peer < size or peer == rank:
        raise CommunicationError(
            f"{what}: position {peer} is no peer of position {rank} in a group of {size};"
            f" name another position from 0 to {size - 1}"
        )


def require_rows(full: Sequence[Tensor], rows: Sequence[Tensor], members: int, member: int) -> None:
    """Refuse results that do not have the shape of this member's rows."""
    if len(full) != len(rows):
        raise CommunicationError(
            f"sum_scatter: {len(full)} full tensors, but {len(rows)} results; give one for each"
        )
    for whole, part in zip(full, rows, strict=True):
        wanted = rows_of(whole, members, member).shape
        if part.shape != wanted:
            raise CommunicationError(
                f"sum_scatter: of a {tuple(whole.shape)} tensor, member {member} of {members} holds"
                f" rows of shape {tuple(wanted)}, but the result has shape {tuple(part.shape)}"
            )


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
