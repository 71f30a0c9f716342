"""What every group owes its members, whoever carries it: run by each member, against plain sums.

Everything is drawn from the member's position, so each member knows what the others hold.
"""

import torch
from torch import Tensor

from terashard.comm.group import Group
from terashard.comm.pieces import rows_of

# uneven, fewer rows than members, empty, many bytes, a row vector, another type beside
SHAPES = [(7, 3), (1, 5), (0, 4), (6, 2), (130, 257), (5,), (400, 100), (2, 3, 4)]


def held_by(member: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What ``member`` contributes."""
    generator = torch.Generator().manual_seed(member * 1000 + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def exchange_everything(group: Group, *, rank_order: bool = True) -> None:
    """All claims on one group; ``rank_order``: its sums are exact to the bit."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        gather_completes_every_tensor(group, dtype)
        scatter_sums(group, dtype, rank_order)
        sums_are_the_same_bits_everywhere(group, dtype)
    mixed_types_travel_together(group)
    integers_and_booleans_travel(group)
    gradients_of_a_narrow_type_land_in_float32(group)
    many_sends_are_outstanding(group)
    bytes_of_any_length_are_gathered(group)
    group.gather_rows([]).wait()
    group.sum_scatter([], []).wait()
    group.barrier()


def gather_completes_every_tensor(group: Group, dtype: torch.dtype) -> None:
    wanted = [held_by(77, shape, dtype) for shape in SHAPES]
    full = [torch.full_like(tensor, -5.0) for tensor in wanted]
    for tensor, right in zip(full, wanted, strict=True):
        own = rows_of(tensor, group.size, group.rank)
        own.copy_(rows_of(right, group.size, group.rank))
    versions = [tensor._version for tensor in full]
    group.gather_rows(full).wait()
    for tensor, right in zip(full, wanted, strict=True):
        assert torch.equal(tensor, right), (dtype, tensor.shape)
    assert [tensor._version for tensor in full] == versions


def scatter_sums(group: Group, dtype: torch.dtype, rank_order: bool) -> None:
    full = [held_by(group.rank, shape, dtype) for shape in SHAPES]
    rows = [torch.full_like(rows_of(t, group.size, group.rank), 9.0) for t in full]
    before = [tensor.clone() for tensor in full]
    group.sum_scatter(full, rows).wait()
    for j, shape in enumerate(SHAPES):
        total = _total(group.size, shape, dtype).to(dtype)
        own = rows_of(total, group.size, group.rank)
        if rank_order:
            assert torch.equal(rows[j], own), (dtype, shape)
        torch.testing.assert_close(rows[j], own)
        assert torch.equal(full[j], before[j])


def sums_are_the_same_bits_everywhere(group: Group, dtype: torch.dtype) -> None:
    for shape in ((3, 2), (1,), (300, 70)):
        tensor = held_by(group.rank, shape, dtype)
        group.sum(tensor).wait()
        exact = _total(group.size, shape, dtype).to(dtype).double()
        tolerance = {torch.bfloat16: 1e-2, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
        assert (tensor.double() - exact).abs().max() <= tolerance * exact.abs().max()
        views = group.gather_bytes(tensor.view(torch.uint8).numpy().tobytes())
        assert all(view == views[0] for view in views)


def mixed_types_travel_together(group: Group) -> None:
    kinds = [torch.bfloat16, torch.float32, torch.float64, torch.bfloat16]
    wanted = [held_by(3, (5, 3), dtype) for dtype in kinds]
    full = [torch.zeros_like(tensor) for tensor in wanted]
    for tensor, right in zip(full, wanted, strict=True):
        rows_of(tensor, group.size, group.rank).copy_(rows_of(right, group.size, group.rank))
    group.gather_rows(full).wait()
    assert all(torch.equal(a, b) for a, b in zip(full, wanted, strict=True))


def integers_and_booleans_travel(group: Group) -> None:
    count = torch.tensor([2**40 + group.rank])
    group.sum(count).wait()
    assert count.item() == group.size * 2**40 + sum(range(group.size))
    flags = torch.zeros(group.size, dtype=torch.bool)
    flags[group.rank] = True
    group.gather_rows([flags]).wait()
    assert bool(flags.all())


def gradients_of_a_narrow_type_land_in_float32(group: Group) -> None:
    full = held_by(group.rank, (6, 5), torch.bfloat16)
    rows = torch.empty_like(rows_of(full, group.size, group.rank), dtype=torch.float32)
    group.sum_scatter([full], [rows]).wait()
    total = _total(group.size, (6, 5), torch.bfloat16)
    assert torch.equal(rows, rows_of(total, group.size, group.rank))


def many_sends_are_outstanding(group: Group) -> None:
    """All send before any receives, in three tags, of two sizes; two tags in turn per peer."""
    peers = [peer for peer in range(group.size) if peer != group.rank]
    sizes = [1 + 5000 * (i % 2) for i in range(24)]
    kept = [
        group.send(torch.full((sizes[i],), 100.0 * group.rank + i), peer, i % 3)
        for i in range(24)
        for peer in peers
    ]
    got = {(peer, i): torch.zeros(sizes[i]) for i in range(24) for peer in peers}
    works = [
        group.receive(got[peer, i], peer, i % 3)
        for tag in (2, 0, 1)
        for i in range(tag, 24, 3)
        for peer in peers
    ]
    for work in [*reversed(works), *kept]:
        work.wait()
        work.wait()
    for (peer, i), tensor in got.items():
        assert torch.equal(tensor, torch.full((sizes[i],), 100.0 * peer + i))


def bytes_of_any_length_are_gathered(group: Group) -> None:
    payloads = group.gather_bytes(bytes([group.rank]) * (group.rank * 1000))
    assert payloads == [bytes([member]) * (member * 1000) for member in range(group.size)]


def _total(members: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The sum in rank order, in the wider of float32 and ``dtype``."""
    wide = torch.promote_types(dtype, torch.float32)
    total = held_by(0, shape, dtype).to(wide)
    for member in range(1, members):
        total = total + held_by(member, shape, dtype).to(wide)
    return total
