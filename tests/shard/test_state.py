"""States in and out: what is read, what is refused by all ranks at once, what a snapshot shares."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import terashard
from terashard.checkpoint.full import FullFile
from terashard.errors import RunError
from tests.helpers.processes import run_processes
from tests.helpers.torch_threads import run_ranks
from tests.shard.engines import (
    WIDTH,
    Block,
    Net,
    loss_of,
    mesh_of,
    same,
    seeded,
    shard,
    whole,
    words,
)


def sharded(build: Any = lambda: seeded(Net()), *shape: int, **arguments: Any) -> Any:
    return terashard.fully_shard(build(), mesh=mesh_of(*shape or (2,)), **arguments)


def other(seed: int = 9) -> dict[str, Tensor]:
    return dict(seeded(Net(), seed).state_dict())


# ---- refusals -----------------------------------------------------------------------------------


def renamed() -> dict[str, Tensor]:
    return {name.replace("head", "tail"): value for name, value in other().items()}


def reshaped() -> dict[str, Tensor]:
    return {**other(), "head.bias": torch.zeros(3, dtype=torch.float64)}


@pytest.mark.parametrize("from_rank_0", [False, True])
@pytest.mark.parametrize("state", [renamed, reshaped, lambda: None])
def test_a_state_that_does_not_fit_is_refused_by_all_ranks_and_changes_nothing(
    state: Any, from_rank_0: bool
) -> None:
    def program(rank: int) -> None:
        model = sharded()
        mine = state() if rank == 0 or not from_rank_0 else None
        with pytest.raises(RunError, match=r"take the state of the same model|takes one on every"):
            terashard.load_full(model, mine, from_rank_0=from_rank_0)
        same(whole(model.state_dict()), other(0), within=0.0)

    run_ranks(2, program, timeout=20)


def refused_over_processes(rank: int, folder: str) -> list[str]:
    """What a rank says of a state that lacks names, and of a file that cannot be written."""
    model = sharded()
    said = []
    for act in (
        lambda: terashard.load_full(model, {} if rank == 0 else None, from_rank_0=True),
        lambda: terashard.save_full(model, f"{folder}/nowhere/model.safetensors"),
    ):
        with pytest.raises(RunError) as caught:
            act()
        said.append(str(caught.value))
    terashard.save_full(model, f"{folder}/model.safetensors")
    return said


@pytest.mark.processes
def test_what_rank_0_refuses_all_processes_refuse_at_once(tmp_path: Path) -> None:
    for said in run_processes(2, refused_over_processes, str(tmp_path)):
        assert "lacks blocks.0.down.bias" in said[0]
        assert "cannot write" in said[1]
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    file = FullFile(tmp_path / "model.safetensors")
    same({name: file[name] for name in other(0)}, other(0), within=0.0)


def test_a_disk_that_fills_up_is_told_to_all_ranks_and_leaves_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"

    def program(rank: int) -> None:
        terashard.save_full(sharded(), path)

    run_ranks(2, program)
    written = path.read_bytes()

    def full(_: Tensor) -> memoryview:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("terashard.checkpoint.full.byte_view", full)

    def again(rank: int) -> None:
        with pytest.raises(RunError, match="No space left on device"):
            terashard.save_full(sharded(lambda: seeded(Net(), 9)), path)

    run_ranks(2, again, timeout=20)
    assert path.read_bytes() == written
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


# ---- what is read -------------------------------------------------------------------------------


def test_of_a_file_each_rank_reads_its_parts_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    run_ranks(1, lambda _: terashard.save_full(sharded(lambda: seeded(Net(), 9), 1), path))
    read = [0, 0, 0]

    def program(rank: int) -> dict[str, Tensor]:
        class Counting(FullFile):
            def part(self, name: str, ranges: tuple[slice, ...]) -> Tensor:
                part = super().part(name, ranges)
                read[rank] += part.numel()
                return part

            def __getitem__(self, name: str) -> Tensor:
                raise AssertionError(f"all of {name} is read")

        model = sharded(lambda: seeded(Net()), 3)
        terashard.load_full(model, Counting(path))
        kept = sum(p._local_tensor.numel() for p in model.parameters())
        assert read[rank] == kept
        return whole(model.state_dict())

    for found in run_ranks(3, program):
        same(found, other(), within=0.0)
    assert sum(read) == sum(value.numel() for value in other().values())


@pytest.mark.parametrize("from_rank_0", [False, True])
def test_parameters_that_are_cut_by_columns_load(from_rank_0: bool) -> None:
    def program(rank: int) -> dict[str, Tensor]:
        model = sharded(shard_placement_fn=lambda p: Shard(p.dim() - 1))
        terashard.load_full(
            model, other() if rank == 0 or not from_rank_0 else None, from_rank_0=from_rank_0
        )
        return whole(model.state_dict())

    for found in run_ranks(2, program):
        same(found, other(), within=0.0)


class Buffered(nn.Module):
    """A layer with a persistent buffer and a 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.table * self.scale
        return out


@pytest.mark.parametrize("from_rank_0", [False, True])
def test_a_state_gives_memory_to_what_is_on_meta(from_rank_0: bool) -> None:
    source = Buffered()
    state = {name: value.detach().clone() for name, value in source.state_dict().items()}

    def program(rank: int) -> None:
        with torch.device("meta"):
            model = Buffered()
        terashard.fully_shard(model, mesh=mesh_of(2), ignored_params={model.linear.bias})
        mine = state if rank == 0 or not from_rank_0 else None
        terashard.load_full(model, mine, from_rank_0=from_rank_0)
        assert isinstance(model.linear.bias, nn.Parameter)
        same(whole(model.state_dict()), state, within=0.0)
        same(model(torch.ones(4)).detach(), source(torch.ones(4)).detach(), within=1e-6)

    run_ranks(2, program)


def by_load_full(model: Any) -> None:
    terashard.load_full(model, other())


def by_plain_state_dict(model: Any) -> None:
    model.load_state_dict(other())


def by_sharded_state_dict(model: Any) -> None:
    model.load_state_dict(sharded(lambda: seeded(Net(), 9)).state_dict())


@pytest.mark.parametrize("load", [by_load_full, by_plain_state_dict, by_sharded_state_dict])
def test_how_ranks_were_built_does_not_matter_once_all_have_loaded(load: Any) -> None:
    def program(rank: int) -> dict[str, Tensor]:
        model = sharded(lambda: seeded(Net(), rank))
        load(model)
        loss_of(model, words(rank, 0)).backward()
        return whole(model.state_dict())

    for found in run_ranks(2, program):
        same(found, other(), within=0.0)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensor_parallel_parameters_go_out_and_in() -> None:
    before = {f"0.{name}": value for name, value in seeded(Block()).state_dict().items()}
    after = {name: value + 1 for name, value in before.items()}

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(seeded(Block()))
        plan = {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        terashard.fully_shard(model, mesh=mesh["dp"])
        same(terashard.full_state_dict(model, rank0_only=False), before, within=0.0)
        terashard.load_full(model, after)
        same(terashard.full_state_dict(model, rank0_only=False), after, within=0.0)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        model(torch.ones(2, WIDTH, dtype=torch.float64)).sum().backward()
        optimizer.step()
        state = terashard.optimizer_by_name(model, optimizer, rank0_only=False)
        terashard.load_optimizer_by_name(model, optimizer, state)
        same(terashard.optimizer_by_name(model, optimizer, rank0_only=False), state, within=0.0)

    run_ranks(4, program)


# ---- snapshots ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_a_snapshot_does_not_change_with_what_it_is_of(size: int) -> None:
    def program(rank: int) -> Any:
        model = sharded(lambda: seeded(Net()), size)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        snapshots = []
        for step in range(2):
            loss_of(model, words(0, step)).backward()
            optimizer.step()
            snapshots.append(
                (
                    terashard.full_state_dict(model, rank0_only=False),
                    terashard.optimizer_by_name(model, optimizer, rank0_only=False),
                )
            )
        return snapshots

    for first, second in run_ranks(size, program):
        assert not torch.equal(first[0]["head.bias"], second[0]["head.bias"])
        assert [s[1]["head.bias"]["step"].item() for s in (first, second)] == [1, 2]
        moments = [s[1]["head.bias"]["exp_avg"] for s in (first, second)]
        assert not torch.equal(*moments)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_parameters_without_optimizer_state_go_out_and_in(kind: Any) -> None:
    def program(rank: int) -> None:
        model = sharded()
        optimizer = kind(model.parameters(), lr=0.1)
        loss_of(model, words(rank, 0)).backward()
        model.head.bias.grad = None
        optimizer.step()
        state = terashard.optimizer_by_name(model, optimizer, rank0_only=False)
        assert state["head.bias"] == {}
        fresh = kind(model.parameters(), lr=0.1)
        terashard.load_optimizer_by_name(model, fresh, state)
        assert (model.head.bias in fresh.state) is False
        assert terashard.optimizer_by_name(model, fresh, rank0_only=False).keys() == state.keys()
        loss_of(model, words(rank, 1)).backward()
        fresh.step()

    run_ranks(2, program)


def test_a_state_that_only_rank_0_has_is_refused_by_all_or_sent() -> None:
    """``full_state_dict`` and ``optimizer_by_name`` give it to rank 0; others raised alone."""

    def program(rank: int) -> Any:
        model: Any = shard(seeded(Net()), 2)
        optimizer = torch.optim.Adam(model.parameters())
        loss_of(model, words(rank, 0)).backward()
        optimizer.step()
        state, moments = (
            terashard.full_state_dict(model),
            terashard.optimizer_by_name(model, optimizer),
        )
        for load in (
            lambda: terashard.load_full(model, state),
            lambda: terashard.load_optimizer_by_name(model, optimizer, moments),
        ):
            with pytest.raises(RunError, match=r"is empty on a rank; .* from_rank_0=True"):
                load()
        before = terashard.optimizer_by_name(model, optimizer, rank0_only=False)
        optimizer.state.clear()
        terashard.load_optimizer_by_name(model, optimizer, moments, from_rank_0=True)
        after = terashard.optimizer_by_name(model, optimizer, rank0_only=False)
        return before, after

    for before, after in run_ranks(2, program):
        same(after, before, within=0.0)


def test_one_rank_with_another_state_stops_all() -> None:
    def program(rank: int) -> None:
        model: Any = shard(seeded(Net()), 2)
        state = terashard.full_state_dict(model, rank0_only=False)
        if rank == 1:
            state["head.bias"] = torch.zeros(3)
        with pytest.raises(RunError, match=r"head\.bias has shape \(11,\), but \(3,\) is to be"):
            terashard.load_full(model, state)

    run_ranks(2, program)
