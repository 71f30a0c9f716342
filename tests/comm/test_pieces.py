import pytest
import torch

from terashard.comm.alone import AloneGroup
from terashard.comm.group import Group
from terashard.comm.pieces import rows_of, sum_in_order, wide_dtype
from terashard.errors import CommunicationError


def test_rows_are_those_of_torch_chunk() -> None:
    tensor = torch.arange(14.0).view(7, 2)
    for members in (1, 2, 3, 4, 7, 9):
        chunks = [*torch.chunk(tensor, members), *([tensor[:0]] * members)]
        for member in range(members):
            assert torch.equal(rows_of(tensor, members, member), chunks[member])


def test_narrow_types_are_summed_in_float32_and_rounded_once() -> None:
    # 256 + 1 is not a bfloat16: three ones vanish one by one, but not together
    parts = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0, 1.0)]
    narrow, wide = torch.empty(1, dtype=torch.bfloat16), torch.empty(1)
    sum_in_order(parts, narrow)
    sum_in_order(parts, wide)
    assert wide.item() == 259.0
    assert narrow.item() == torch.tensor(259.0).bfloat16().item() != 256.0


def test_sums_run_from_the_first_part_to_the_last() -> None:
    parts = [torch.tensor([x]) for x in (1e8, -1e8, 1.0)]
    out = torch.empty(1)
    sum_in_order(parts, out)
    assert out.item() == 1.0
    sum_in_order(parts[::-1], out)
    assert out.item() == 0.0
    assert [part.item() for part in parts] == [1e8, -1e8, 1.0]


def test_parts_stay_as_they_are_when_the_sum_lands_in_another_type() -> None:
    parts, out = [torch.ones(2), torch.ones(2)], torch.empty(2, dtype=torch.bfloat16)
    sum_in_order(parts, out)
    assert out.tolist() == [2.0, 2.0]
    assert parts[0].tolist() == [1.0, 1.0]


def test_integers_are_summed_in_their_own_type() -> None:
    big = 2**53 + 1
    out = torch.empty(1, dtype=torch.int64)
    sum_in_order([torch.tensor([big]), torch.tensor([1])], out)
    assert out.item() == big + 1
    assert wide_dtype(torch.float64) is torch.float64


def test_a_member_alone_has_everything_already() -> None:
    group: Group = AloneGroup(5)
    full, rows, total = torch.arange(6.0).view(3, 2), torch.empty(3, 2), torch.ones(2)
    group.gather_rows([full]).wait()
    group.sum_scatter([full], [rows]).wait()
    group.sum(total).wait()
    group.barrier()
    assert torch.equal(rows, full)
    assert torch.equal(total, torch.ones(2))
    assert (group.rank, group.size, group.ranks) == (0, 1, (5,))
    assert group.gather_bytes(b"x") == [b"x"]
    with pytest.raises(CommunicationError, match="rank 5 is alone"):
        group.send(full, 0)
    with pytest.raises(CommunicationError, match="rank 5 is alone"):
        group.receive(full, 0)
