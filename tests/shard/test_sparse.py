"""Gradients of a few rows: exchanged with the ranks that keep them, and stepped on alone."""

import pytest
import torch
from torch import Tensor, nn

from terashard.comm.collectives import group_over
from terashard.comm.group import Group
from terashard.comm.rows import row_range
from terashard.comm.threads import ThreadWorld, run_threads
from terashard.shard.sparse import exchange_rows, touch, touched_rows
from tests.helpers.processes import run_processes

WIDTH = 3


# ---- the exchange -------------------------------------------------------------------------------


def pairs(rows: int, rank: int) -> tuple[Tensor, Tensor]:
    """Row numbers, some of them twice, and values of one rank."""
    generator = torch.Generator().manual_seed(rank)
    index = torch.randint(0, rows, (7,), generator=generator)
    values = torch.randn(7, WIDTH, generator=generator, dtype=torch.float64)
    return index, values


def gradient_of(rows: int, rank: int, silent: tuple[int, ...] = ()) -> Tensor | None:
    """A sparse gradient [rows, WIDTH] that is not coalesced; None on ``silent`` ranks."""
    if rank in silent:
        return None
    index, values = pairs(rows, rank)
    return torch.sparse_coo_tensor(
        index[None], values, (rows, WIDTH), check_invariants=True, is_coalesced=False
    )


def exchanged(
    group: Group, rows: int, silent: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    own = row_range(rows, group.size, group.rank)
    like = torch.zeros(own[1] - own[0], WIDTH, dtype=dtype)
    gradient = gradient_of(rows, group.rank, silent)
    return exchange_rows(gradient, torch.Size((rows, WIDTH)), like, group)


def assert_rows(
    found: list[tuple[Tensor, Tensor]], rows: int, silent: tuple[int, ...], within: float
) -> None:
    """Every rank has the rows that anyone touched, once, in order, and their sums."""
    total = torch.zeros(rows, WIDTH, dtype=torch.float64)
    anyone: set[int] = set()
    for rank in range(len(found)):
        if rank not in silent:
            index, values = pairs(rows, rank)
            total.index_add_(0, index, values)
            anyone |= set(index.tolist())
    for rank, (index, values) in enumerate(found):
        start, stop = row_range(rows, len(found), rank)
        assert (index + start).tolist() == sorted(r for r in anyone if start <= r < stop)
        torch.testing.assert_close(values, total[start:stop][index], rtol=within, atol=within)


@pytest.mark.parametrize(
    ("size", "rows", "silent"),
    [
        (1, 5, ()),
        (2, 6, ()),
        (3, 7, ()),  # uneven
        (5, 3, ()),  # ranks without rows
        (3, 7, (1,)),  # a rank without a gradient
        (3, 7, (0, 1, 2)),
    ],
)
def test_every_rank_gets_the_sums_of_its_rows(
    size: int, rows: int, silent: tuple[int, ...]
) -> None:
    def work(world: ThreadWorld, rank: int) -> tuple[Tensor, Tensor]:
        group = world.group(rank, range(size), "rows")
        return exchanged(group, rows, silent, torch.float64)

    assert_rows(run_threads(size, work), rows, silent, 1e-14)


def test_sums_are_taken_in_the_format_of_the_kept_rows() -> None:
    """Of one rank, and over ranks: 256 + 1 + 1 in bfloat16 would be 256."""

    def work(world: ThreadWorld, rank: int) -> Tensor:
        index, values = [1, 1], [1.0, 0.0] if rank else [256.0, 1.0]
        gradient = torch.sparse_coo_tensor(
            torch.tensor([index]),
            torch.tensor(values)[:, None].bfloat16(),
            (2, 1),
            check_invariants=True,
        )
        group = world.group(rank, range(2), "rows")
        return exchange_rows(gradient, torch.Size((2, 1)), torch.zeros(1, 1), group)[1]

    first, second = run_threads(2, work)
    assert first.shape == (0, 1)
    assert torch.equal(second, torch.tensor([[258.0]]))


def over_gloo(rank: int, size: int, rows: int) -> tuple[list[int], list[list[float]]]:
    world = torch.distributed.group.WORLD
    assert world is not None
    index, values = exchanged(group_over(world, "rows"), rows, (1,), torch.float64)
    return index.tolist(), values.tolist()


@pytest.mark.processes
def test_rows_travel_between_processes() -> None:
    found = run_processes(3, over_gloo, 3, 7)
    tensors = [
        (torch.tensor(i, dtype=torch.int64), torch.tensor(v, dtype=torch.float64).view(-1, WIDTH))
        for i, v in found
    ]
    assert_rows(tensors, 7, (1,), 1e-14)


# ---- what was touched ---------------------------------------------------------------------------


def test_rows_of_one_gradient_add_up_until_it_is_cleared() -> None:
    parameter = nn.Parameter(torch.zeros(5, 2))
    assert touched_rows(parameter) is None
    touch(parameter, torch.tensor([1, 3]), anew=True)
    assert touched_rows(parameter) is None  # no gradient yet
    parameter.grad = torch.ones(5, 2)
    touch(parameter, torch.tensor([0, 3]), anew=False)
    assert touched_rows(parameter).tolist() == [0, 1, 3]  # type: ignore[union-attr]
    parameter.grad = None
    assert touched_rows(parameter) is None


def test_a_gradient_that_was_cleared_in_place_counts_as_none() -> None:
    parameter = nn.Parameter(torch.zeros(5, 2))
    touch(parameter, torch.tensor([1, 3]), anew=True)
    parameter.grad = torch.zeros(5, 2)
    touch(parameter, torch.tensor([0]), anew=False)
    assert touched_rows(parameter).tolist() == [0]  # type: ignore[union-attr]
