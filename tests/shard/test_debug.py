"""What ranks say besides tensors: nothing while all is well, and enough when it is not."""

import gc
import os
import re
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import terashard
from terashard.comm.board import Board
from terashard.errors import ConfigError, RunError
from terashard.shard.turn import _patience
from tests.helpers.processes import run_processes
from tests.helpers.torch_threads import run_ranks
from tests.shard.engines import Net, loss_of, mesh_of, seeded, words


def sharded(model: Any, *shape: int) -> Any:
    mesh = mesh_of(*shape)
    for block in model.blocks:
        terashard.fully_shard(block, mesh=mesh)
    return terashard.fully_shard(model, mesh=mesh)


def refusals(size: int, program: Any) -> dict[int, str]:
    """Why each rank refused; ``program(rank)`` must raise on all."""

    def refused(rank: int) -> str:
        with pytest.raises(RunError) as caught:
            program(rank)
        return str(caught.value)

    return dict(enumerate(run_ranks(size, refused)))


class Forked(Net):
    """Uses the blocks that it is told."""

    takes: Sequence[int] = (0, 1, 2)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for index in self.takes:
            x = self.blocks[index](x)
        out: torch.Tensor = self.head(x)
        return out


# ---- nothing, while all is well -----------------------------------------------------------------


def test_once_agreed_nothing_is_said_whatever_units_a_rank_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    plain = Board.exchange

    def noted(self: Board, topic: str, *args: Any, **kwargs: Any) -> dict[int, str]:
        said.append(topic)
        return plain(self, topic, *args, **kwargs)

    monkeypatch.setattr(Board, "exchange", noted)
    everything = (0, 1, 2)
    takes = [(everything, everything), ((0, 1), (0, 2)), (everything, (2,)), ((1,), ())]

    def program(rank: int) -> list[int]:
        model: Any = sharded(seeded(Forked()), 2)
        counts = []
        for step, by_rank in enumerate(takes):
            model.takes = by_rank[rank]
            loss_of(model, words(rank, step)).backward()
            counts.append(sum(unit.traffic.gathers for s in _shardings(model) for unit in s.units))
        return counts

    one, other = run_ranks(2, program)
    assert one == other
    assert sorted(said) == sorted(2 * ["values", "record forward", "record backward"])


@pytest.mark.parametrize("last", [((0, 1, 2), (0, 2)), ((0, 2), (0, 1, 2))])
def test_branches_that_differ_in_the_first_pass_leave_the_order_as_it_was(last: Any) -> None:
    """Two records that left it open were once merged in an order that no rank would use."""

    def program(rank: int) -> None:
        model: Any = sharded(seeded(Forked()), 2)
        for step, takes in enumerate([((0, 1), (0, 2)), last]):
            model.takes = takes[rank]
            loss_of(model, words(rank, step)).backward()

    run_ranks(2, program)


def test_a_rank_that_is_only_slow_in_its_first_pass_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was taken for one that used units in another order."""
    monkeypatch.setitem(Board.exchange.__kwdefaults__, "patience", 0.2)

    def program(rank: int) -> None:
        model: Any = sharded(seeded(Net()), 2)
        if rank == 1:
            model.head.register_forward_hook(lambda *_: time.sleep(1.0))
        loss_of(model, words(rank, 0)).backward()

    run_ranks(2, program)


def _shardings(model: Any) -> list[Any]:
    return [model._own, *(block._own for block in model.blocks)]


# ---- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "odd"), [((2,), 1), ((3,), 2), ((2, 2), 3), ((2, 2), 2)])
def test_values_that_differ_anywhere_on_the_mesh_are_named(
    shape: tuple[int, ...], odd: int
) -> None:
    def program(rank: int) -> None:
        model: Any = seeded(Net())
        if rank == odd:
            with torch.no_grad():
                model.blocks[1].up.bias[-1] += 1e-12
        sharded(model, *shape)
        model(words(rank, 0))

    found = refusals(torch.Size(shape).numel(), program)
    for rank, why in found.items():
        other = odd if rank != odd else 0
        assert f"ranks {rank} and {other} held different values" in why
        assert "parameter blocks.1.up.bias " in why


def test_equal_values_pass_whatever_their_type_shape_and_memory_order() -> None:
    def program(rank: int) -> None:
        model: Any = nn.Module()
        model.transposed = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        model.scalar = nn.Parameter(torch.ones((), dtype=torch.float64))
        model.empty = nn.Parameter(torch.empty(0, 3))
        model.waves = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        model.bf16 = nn.Parameter(torch.full((2, 2), float("nan"), dtype=torch.bfloat16))
        model.forward = lambda: (model.transposed.sum() + model.waves.abs().sum()) * model.scalar
        terashard.fully_shard(model, mesh=mesh_of(2))
        model().backward()

    run_ranks(2, program)


# ---- debug mode ---------------------------------------------------------------------------------


def test_debug_mode_names_both_collectives_where_ranks_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both have the same bytes to send: without the mode, each would compute with the other's."""
    monkeypatch.setenv("TERASHARD_DEBUG", "1")

    def program(rank: int) -> None:
        model: Any = sharded(seeded(Net()), 2)
        with torch.no_grad():
            model(words(rank, 0))
        model.blocks[rank].unshard()

    for why in refusals(2, program).values():
        assert re.fullmatch(
            r"rank 0: gathers unit blocks\.0 \(act (\d+)\);"
            r" rank 1: gathers unit blocks\.1 \(act \1\)",
            why,
        )


_ONE_MORE = (
    r"rank 0: gathers unit root \(act \d+\); rank 1: said nothing for 8 s, so it is doing something"
    r" else \(it said before: sums unit \S+ \(act \d+\)\)"
)


def one_more(rank: int) -> float:
    """Seconds until rank 0, which has a batch more than rank 1, is told so."""
    os.environ["TERASHARD_DEBUG"] = "1"
    model = sharded(seeded(Net()), 2)
    loss_of(model, words(rank, 0)).backward()
    begin = time.monotonic()
    if rank == 0:
        with pytest.raises(RunError, match=_ONE_MORE):
            model(words(rank, 1))
    return time.monotonic() - begin


@pytest.mark.processes
def test_in_debug_mode_a_rank_with_one_more_batch_is_told_within_ten_seconds() -> None:
    assert run_processes(2, one_more, timeout=30.0)[0] < 10.0


# ---- optimizers ---------------------------------------------------------------------------------


def test_an_optimizer_with_one_replaced_parameter_among_its_own_is_found() -> None:
    def program(_: int) -> None:
        model: Any = seeded(Net())
        alone = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.Adam(
            [{"params": [alone]}, {"params": [model.blocks[2].down.weight], "lr": 0.1}]
        )
        sharded(model, 1)
        with pytest.raises(RunError, match=r"Adam holds 1 parameter that .* \(down\.weight\)"):
            optimizer.step()

    run_ranks(1, program)


def test_an_early_optimizer_is_found_at_every_step_even_if_it_stepped_before_sharding() -> None:
    """It was looked at once only: when it was still right, or before the error was caught."""

    def program(_: int) -> None:
        sharded(seeded(Net()), 1)
        model: Any = seeded(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, words(0, 0)).backward()
        optimizer.step()
        sharded(model, 1)
        for _ in range(2):
            with pytest.raises(RunError, match="holds 15 parameters"):
                optimizer.step()

    run_ranks(1, program)


def test_a_replaced_parameter_that_is_added_after_a_good_step_is_found() -> None:
    def program(_: int) -> None:
        model: Any = seeded(Net())
        original = model.head.weight
        sharded(model, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, words(0, 0)).backward()
        optimizer.step()
        optimizer.add_param_group({"params": [original]})
        with pytest.raises(RunError, match=r"holds 1 parameter .*head\.weight"):
            optimizer.step()

    run_ranks(1, program)


def test_optimizers_of_sharded_and_of_other_parameters_are_not_stopped() -> None:
    def program(_: int) -> None:
        other = seeded(Net())
        before = torch.optim.SGD(other.parameters(), lr=0.1)
        model = sharded(seeded(Net()), 1)
        after = torch.optim.SGD(model.parameters(), lr=0.1)
        for optimizer, one in [(before, other), (after, model)]:
            loss_of(one, words(0, 0)).backward()
            optimizer.step()

    run_ranks(1, program)


def test_replaced_parameters_and_optimizers_are_not_kept_alive() -> None:
    def program(_: int) -> list[bool]:
        model: Any = seeded(Net())
        original = weakref.ref(model.blocks[0].up.weight)
        sharded(model, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, words(0, 0)).backward()
        optimizer.step()
        gone = weakref.ref(optimizer)
        del optimizer, model
        gc.collect()
        return [original() is None, gone() is None]

    assert run_ranks(1, program) == [[True, True]]


# ---- what newcomers did -------------------------------------------------------------------------


def test_an_outer_module_sharded_first_is_named() -> None:
    def program(rank: int) -> None:
        model: Any = seeded(Net())
        terashard.fully_shard(model, mesh=mesh_of(2))
        with pytest.raises(ConfigError, match=r"sharded already, with Net around it; call"):
            terashard.fully_shard(model.blocks[0], mesh=mesh_of(2))

    run_ranks(2, program)


def test_a_root_that_nobody_sharded_is_told_by_the_optimizer() -> None:
    def program(rank: int) -> list[str]:
        model: Any = seeded(Net())
        for block in model.blocks:
            terashard.fully_shard(block, mesh=mesh_of(2))
        loss_of(model, words(rank, 0)).backward()
        if rank == 0:  # warnings are the process's, not the thread's
            with pytest.warns(UserWarning, match=r"holds 3 plain parameters .* the root module"):
                torch.optim.SGD(model.parameters(), 0.1, foreach=False).step()
        return []

    run_ranks(2, program)


def test_parameters_that_are_ignored_on_purpose_are_no_cause_for_a_warning() -> None:
    def program(rank: int) -> None:
        model: Any = seeded(Net())
        alone = {model.head.weight, model.head.bias}
        for block in model.blocks:
            terashard.fully_shard(block, mesh=mesh_of(2))
        terashard.fully_shard(model, mesh=mesh_of(2), ignored_params=alone)
        loss_of(model, words(rank, 0)).backward()
        torch.optim.SGD(model.parameters(), 0.1, foreach=False).step()

    run_ranks(2, program)


def test_a_forward_while_full_parameters_are_open_is_refused() -> None:
    def program(rank: int) -> None:
        model = sharded(seeded(Net()), 2)
        with (
            terashard.full_parameters(model),
            pytest.raises(RunError, match="full_parameters is open; leave it before the next"),
        ):
            model(words(rank, 0))
        model(words(rank, 0))

    run_ranks(2, program)


def test_a_pool_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="no pool 'dynamic'; there are: static, any, off"):
        terashard.fully_shard(nn.Linear(2, 2), pool="dynamic")  # type: ignore[arg-type]


def test_debug_mode_may_be_as_patient_as_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for said in ("", "0", "1", "yes", "60"):
        monkeypatch.setenv("TERASHARD_DEBUG", said)
        found.append(_patience())
    assert found == [None, None, 8.0, 8.0, 60.0]
