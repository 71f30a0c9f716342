"""Values of sharded modules: at birth, in full, to a file and back, over any number of ranks."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import terashard
from terashard.errors import ConfigError, RunError
from terashard.shard.policy import UnevenUnitsWarning
from tests.helpers.processes import run_processes
from tests.helpers.torch_threads import run_ranks
from tests.shard.engines import (
    Block,
    Here,
    Net,
    gradients,
    loss_of,
    mesh_of,
    run,
    same,
    seeded,
    shard,
    whole,
    words,
)


def net() -> nn.Module:
    return seeded(Net())


# ---- birth --------------------------------------------------------------------------------------


def born(rank: int) -> dict[str, Tensor]:
    """Built on meta, sharded, initialised: the full values."""
    with torch.device("meta"):
        model = Net()
    shard(model, 2)
    torch.manual_seed(5)
    terashard.initialise(model)
    loss_of(model, words(rank, 0)).backward()
    return whole(model.state_dict())


@pytest.mark.processes
def test_a_birth_on_meta_is_an_eager_build_to_the_bit() -> None:
    torch.manual_seed(5)
    expected = dict(Net().state_dict())
    for found in run_processes(2, born):
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


class Rotary(nn.Module):
    """A layer with a buffer that its reset writes, if ``writes``."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.writes = writes
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)

    def reset_parameters(self) -> None:
        if self.writes:
            self.frequencies = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.frequencies
        return out


@pytest.mark.parametrize("writes", [False, True])
def test_a_buffer_that_nobody_writes_is_an_error_that_names_it(writes: bool) -> None:
    def program(rank: int) -> None:
        with torch.device("meta"):
            model = nn.Sequential(Rotary(writes), nn.Linear(4, 4))
        terashard.fully_shard(model[0], mesh=mesh_of(2))
        terashard.fully_shard(model, mesh=mesh_of(2))
        if writes:
            terashard.initialise(model)
            assert torch.equal(model[0].frequencies, torch.arange(4.0))  # type: ignore[arg-type]
        else:
            with pytest.raises(RunError, match=r"0\.frequencies was built on meta, and nothing"):
                terashard.initialise(model)

    run_ranks(2, program)


def test_the_callers_function_may_write_everything_and_data_counts() -> None:
    def fill(module: nn.Module) -> None:
        for index, p in enumerate(module.parameters(recurse=False)):
            p.data.fill_(0.1 * (index + 1))

    def program(rank: int) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = Net()
        shard(model, 2)
        terashard.initialise(model, init=fill)
        return whole(model.state_dict())

    expected = Net()
    expected.apply(fill)
    for found in run_ranks(2, program):
        same(found, dict(expected.state_dict()))


def test_a_function_that_writes_nothing_is_an_error_that_names_a_parameter() -> None:
    def program(rank: int) -> None:
        with torch.device("meta"):
            model = Net()
        shard(model, 2)
        with pytest.raises(RunError, match=r"blocks\.0\.up\.weight|embed\.weight"):
            terashard.initialise(model, init=lambda _: None)
        with pytest.raises(ConfigError, match="shard it first"):
            terashard.initialise(nn.Linear(2, 2))

    run_ranks(2, program)


def test_ranks_that_differ_can_be_given_the_values_of_the_first() -> None:
    def program(here: Here) -> Any:
        with torch.no_grad():
            for p in here.model.parameters():
                p.add_(here.rank)
        terashard.synchronise(here.model)
        shard(here.model, 2)
        loss_of(here.model, words(here.rank, 0)).backward()
        return whole(here.model.state_dict())

    for found in run("ours", program, 2, net):
        same(found, dict(net().state_dict()))


def test_buffers_can_be_made_alike() -> None:
    def program(rank: int) -> tuple[float, int]:
        model: Any = nn.BatchNorm1d(3)
        model.running_mean.fill_(rank)
        model.num_batches_tracked.fill_(rank + 4)
        terashard.synchronise_buffers(model)
        return model.running_mean[0].item(), model.num_batches_tracked.item()

    assert run_ranks(2, program) == [(0.5, 4), (0.5, 4)]


# ---- in full ------------------------------------------------------------------------------------


def test_full_parameters_may_be_looked_at_and_changed() -> None:
    def program(here: Here) -> Any:
        shard(here.model, 2)
        with terashard.full_parameters(here.model):
            seen = {n: p.detach().clone() for n, p in here.model.named_parameters()}
            assert not any(isinstance(p, DTensor) for p in here.model.parameters())
            with torch.no_grad():
                here.model.head.bias.fill_(9.0)
        with terashard.full_parameters(here.model, writeback=True), torch.no_grad():
            here.model.blocks[0].up.weight.mul_(2.0)
        with terashard.full_parameters(here.model, rank0_only=True):
            assert isinstance(here.model.head.weight, DTensor) is (here.rank != 0)
        loss = loss_of(here.model, words(0, 0))
        return seen, whole(here.model.state_dict()), loss.item()

    plain: Any = net()
    before = {n: p.detach().clone() for n, p in plain.named_parameters()}
    with torch.no_grad():
        plain.blocks[0].up.weight.mul_(2.0)
    expected = before, dict(plain.state_dict()), loss_of(plain, words(0, 0)).item()
    for found in run("ours", program, 2, net):
        same(found, expected)


def test_full_parameters_refuses_to_change_one_rank_or_a_pass_that_runs() -> None:
    class Looking(Block):
        def forward(self, x: Tensor) -> Tensor:
            with terashard.full_parameters(self):
                return super().forward(x)

    def program(here: Here) -> None:
        model: Any = here.model
        model.blocks[0].__class__ = Looking
        shard(model, 2)
        with pytest.raises(RunError, match="between passes"):
            model(words(0, 0))
        with (
            pytest.raises(ConfigError, match="give one of the two"),
            terashard.full_parameters(model, writeback=True, rank0_only=True),
        ):
            pass

    run("ours", program, 2, net)


def test_full_state_goes_to_rank_0_and_loads_anywhere() -> None:
    def out(here: Here) -> dict[str, Tensor]:
        shard(here.model, 3)
        return terashard.full_state_dict(here.model)

    states = run("ours", out, 3, net)
    same(states[0], dict(net().state_dict()))
    assert states[1] == states[2] == {}

    def back(here: Here) -> Any:
        terashard.fully_shard(here.model, mesh=mesh_of(2, 2))
        mine = states[0] if here.rank == 0 else None
        terashard.load_full(here.model, mine, from_rank_0=True)
        with pytest.raises(RunError, match="take the state of the same model"):
            terashard.load_full(here.model, {"other": torch.zeros(1)})
        return whole(here.model.state_dict())

    for found in run("ours", back, 4, lambda: seeded(Net(), 9)):
        same(found, states[0])


def test_a_file_of_all_is_plain_safetensors_and_loads_over_other_ranks(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def out(here: Here) -> None:
        shard(here.model, 2)
        terashard.save_full(here.model, path)

    run("ours", out, 2, net)
    from safetensors.torch import load_file

    same(load_file(path), dict(net().state_dict()))

    def back(here: Here) -> Any:
        shard(here.model, 3)
        terashard.load_full(here.model, terashard.read_full(path))
        return whole(here.model.state_dict())

    for found in run("ours", back, 3, lambda: seeded(Net(), 9)):
        same(found, dict(net().state_dict()))


def test_optimizer_state_by_name_resumes_over_other_ranks_and_units() -> None:
    def steps(model: nn.Module, optimizer: Any, ranks: list[int], first: int) -> None:
        for step in range(first, first + 2):
            optimizer.zero_grad()
            for rank in ranks:
                (loss_of(model, words(rank, step)) / len(ranks)).backward()
            optimizer.step()

    plain = net()
    adam = torch.optim.Adam(plain.parameters(), lr=0.01)
    steps(plain, adam, [0, 1], 0)

    def first(here: Here) -> Any:
        shard(here.model, 2)
        optimizer = torch.optim.Adam(here.model.parameters(), lr=0.01)
        steps(here.model, optimizer, [here.rank], 0)
        return (
            terashard.full_state_dict(here.model),
            terashard.optimizer_by_name(here.model, optimizer),
        )

    values, state = run("ours", first, 2, net)[0]
    assert set(state) == {name for name, _ in plain.named_parameters()}
    steps(plain, adam, [0, 1], 2)

    def second(here: Here) -> Any:
        terashard.fully_shard(here.model, mesh=mesh_of(1))
        terashard.load_full(here.model, values)
        optimizer = torch.optim.Adam(list(here.model.parameters())[::-1], lr=0.01)
        terashard.load_optimizer_by_name(here.model, optimizer, state)
        steps(here.model, optimizer, [0, 1], 2)
        return whole(here.model.state_dict())

    same(run("ours", second, 1, net)[0], dict(plain.state_dict()))


# ---- around -------------------------------------------------------------------------------------


def test_an_optimizer_that_was_built_before_sharding_is_found_at_its_first_step() -> None:
    def program(here: Here) -> None:
        optimizer = torch.optim.SGD(here.model.parameters(), lr=0.1)
        shard(here.model, 2)
        loss_of(here.model, words(here.rank, 0)).backward()
        with pytest.raises(RunError, match=r"holds 15 parameters that fully_shard has replaced"):
            optimizer.step()

    run("ours", program, 2, net)


@pytest.mark.parametrize(
    "choose",
    [
        terashard.of_class(Block),
        terashard.of_size(100),
        lambda name, _: name.startswith("blocks.") and name.count(".") == 1,
    ],
)
def test_units_may_be_chosen_by_class_by_size_or_by_function(choose: Any) -> None:
    def program(here: Here) -> Any:
        terashard.shard_where(here.model, choose, mesh=mesh_of(2))
        loss_of(here.model, words(here.rank, 0)).backward()
        table = terashard.describe_units(here.model)
        assert "blocks.1" in table
        assert "root" in table
        return gradients(here.model)

    def plain(here: Here) -> Any:
        shard(here.model, 2)
        loss_of(here.model, words(here.rank, 0)).backward()
        return gradients(here.model)

    same(run("ours", program, 2, net), run("ours", plain, 2, net))


def test_a_unit_that_holds_most_is_warned_of_and_no_unit_at_all_is_refused() -> None:
    def program(here: Here) -> None:
        model: Any = here.model
        with pytest.raises(ConfigError, match="choose its blocks"):
            terashard.shard_where(model, lambda *_: False, mesh=mesh_of(1))
        with pytest.warns(UnevenUnitsWarning, match="unit root holds"):
            terashard.shard_where(model, lambda name, _: name == "blocks.0.up", mesh=mesh_of(1))

    run("ours", program, 1, net)


def scaled(rank: int, bad: int) -> tuple[bool, float]:
    """One step under a scaler where rank ``bad`` has an infinite gradient."""
    model: Any = seeded(Net()).float()
    shard(model, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = terashard.ShardedGradScaler("cpu", init_scale=8.0)
    loss = loss_of(model, words(rank, 0))
    scaler.scale(loss).backward()
    if rank == bad:
        model.blocks[1].up.weight.grad._local_tensor[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    moved = any(
        not torch.equal(whole({"": p})[""], whole({"": before[n]})[""])
        for n, p in model.named_parameters()
    )
    return moved, scaler.get_scale()


@pytest.mark.parametrize("bad", [0, 1, None])
def test_an_infinity_on_one_rank_makes_all_skip(bad: int | None) -> None:
    found = run_ranks(2, scaled, -1 if bad is None else bad)
    assert found == [(bad is None, 8.0 if bad is None else 4.0)] * 2


def test_debug_mode_names_a_rank_that_does_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERASHARD_DEBUG", "1")
    monkeypatch.setattr("terashard.shard.turn._SILENCE", 0.5)

    def program(here: Here) -> None:
        shard(here.model, 2)
        for step in range(2 if here.rank == 0 else 1):
            loss_of(here.model, words(here.rank, step)).backward()

    with pytest.raises(RunError, match=r"rank 0: gathers unit root .*rank 1: said nothing"):
        run("ours", program, 2, net)


def test_debug_mode_changes_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(here: Here) -> Any:
        shard(here.model, 2)
        loss_of(here.model, words(here.rank, 0)).backward()
        return gradients(here.model)

    expected = run("ours", program, 2, net)
    monkeypatch.setenv("TERASHARD_DEBUG", "1")
    same(run("ours", program, 2, net), expected)


def test_a_parameter_that_was_replaced_is_named() -> None:
    def program(here: Here) -> None:
        model: Any = here.model
        shard(model, 1)
        model.blocks[1].up.weight = nn.Parameter(torch.zeros(3, 3))
        with pytest.raises(RunError, match=r"blocks\.1\.up\.weight was replaced"):
            model(words(0, 0))

    run("ours", program, 1, net)


def test_a_copy_of_a_plain_model_is_not_touched() -> None:
    def program(here: Here) -> None:
        spare = deepcopy(here.model)
        shard(here.model, 2)
        loss_of(spare, words(0, 0)).backward()
        torch.optim.SGD(spare.parameters(), lr=0.1).step()

    run("ours", program, 2, net)
