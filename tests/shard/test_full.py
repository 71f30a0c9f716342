"""A look at full parameters: where it may be taken, what it leaves behind, what it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import terashard
from terashard.errors import CheckpointError, RunError
from tests.helpers.torch_threads import run_ranks
from tests.shard.engines import Block, Net, gradients, loss_of, mesh_of, same, seeded, whole, words


def sharded(*shape: int, **arguments: Any) -> Any:
    model: Any = seeded(Net())
    for block in model.blocks:
        terashard.fully_shard(block, mesh=mesh_of(*shape), **arguments)
    return terashard.fully_shard(model, mesh=mesh_of(*shape), **arguments)


def refusal(model: nn.Module) -> str:
    """What full_parameters says."""
    with pytest.raises(RunError) as caught, terashard.full_parameters(model):
        pass
    return str(caught.value)


@pytest.mark.parametrize("arguments", [{}, {"reshard_after_forward": False}, {"pool": "any"}])
def test_a_look_between_forward_and_backward_changes_no_gradient(arguments: Any) -> None:
    def program(rank: int) -> Any:
        model = sharded(2, **arguments)
        found = []
        for looks in (False, True):
            model.zero_grad()
            loss = loss_of(model, words(rank, 0))
            if looks:
                with terashard.full_parameters(model):
                    pass
            loss.backward()
            found.append(gradients(model))
        return found

    for plain, looked in run_ranks(2, program):
        same(looked, plain, within=0.0)


def test_a_backward_after_a_change_is_refused_not_wrong() -> None:
    def program(rank: int) -> None:
        model = sharded(2)
        loss = loss_of(model, words(rank, 0))
        with terashard.full_parameters(model, writeback=True), torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run_ranks(2, program)


def test_a_look_after_unshard_or_a_forward_without_backward_is_allowed() -> None:
    def program(rank: int) -> list[dict[str, Tensor]]:
        model, found = sharded(2), []
        for before in (model.unshard, lambda: loss_of(model, words(rank, 0))):
            before()
            with terashard.full_parameters(model):
                found.append({n: p.detach().clone() for n, p in model.named_parameters()})
        return found

    expected = {n: p.detach() for n, p in seeded(Net()).named_parameters()}
    for found in run_ranks(2, program):
        same(found, [expected, expected], within=0.0)


def test_a_look_from_inside_a_backward_pass_is_refused_and_the_pass_goes_on() -> None:
    def program(rank: int) -> Any:
        model, said = sharded(2), []
        loss_of(model, words(rank, 0)).backward()
        expected = gradients(model)
        model.zero_grad()

        def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
            output.register_hook(lambda _: said.append(refusal(model)))

        model.blocks[1].register_forward_hook(watch)
        loss_of(model, words(rank, 0)).backward()
        same(gradients(model), expected, within=0.0)
        return said

    for said in run_ranks(2, program):
        assert len(said) == 1
        assert "between passes" in said[0]


class Peeking(Block):
    """A block that looks at a block that rests, in the middle of a pass."""

    other: Callable[[], nn.Module]

    def forward(self, x: Tensor) -> Tensor:
        assert "between passes" in refusal(self.other())
        return super().forward(x)


def test_a_look_at_a_unit_that_rests_inside_a_pass_of_others_is_refused() -> None:
    def program(rank: int) -> None:
        model: Any = seeded(Net())
        model.blocks[1].__class__ = Peeking
        model.blocks[1].__dict__["other"] = lambda: model.blocks[0]
        for block in model.blocks:
            terashard.fully_shard(block, mesh=mesh_of(2))
        terashard.fully_shard(model, mesh=mesh_of(2))
        loss_of(model, words(rank, 0)).backward()

    run_ranks(2, program)


def test_a_second_look_inside_the_first_is_refused_and_the_first_is_kept() -> None:
    def program(rank: int) -> Tensor:
        model = sharded(2)
        with terashard.full_parameters(model, writeback=True), torch.no_grad():
            model.head.bias.fill_(7.0)
            assert "open for unit" in refusal(model.blocks[0])
        with terashard.full_parameters(model):
            pass
        return whole(model.state_dict())["head.bias"]

    for bias in run_ranks(2, program):
        assert torch.equal(bias, torch.full_like(bias, 7.0))


def test_another_shape_is_refused_and_all_units_are_in_pieces_again() -> None:
    def program(rank: int) -> None:
        model = sharded(2)
        with (
            pytest.raises(RunError, match="change values, not shapes"),
            terashard.full_parameters(model, writeback=True),
        ):
            model.blocks[0].up.weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))
        assert all(isinstance(p, DTensor) for p in model.parameters())
        same(whole(model.state_dict()), dict(seeded(Net()).state_dict()), within=0.0)

    run_ranks(2, program)


def test_a_look_sees_what_was_put_in_place_of_the_parameters() -> None:
    def program(rank: int) -> None:
        model, other = sharded(2), sharded(2)
        with torch.no_grad():
            other.head.bias.fill_(3.0)
        model.load_state_dict(other.state_dict(), assign=True)
        with terashard.full_parameters(model):
            assert model.head.bias.eq(3.0).all()

    run_ranks(2, program)


def test_values_that_were_never_written_are_neither_shown_nor_saved() -> None:
    def program(rank: int) -> None:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4))
        terashard.fully_shard(model, mesh=mesh_of(2))
        assert "never written" in refusal(model)
        with pytest.raises(RunError, match="never written"):
            terashard.full_state_dict(model)

    run_ranks(2, program)


# ---- alike on all ranks -------------------------------------------------------------------------


def test_the_mean_of_equal_buffers_is_that_buffer_to_the_bit() -> None:
    def program(rank: int) -> None:
        module = nn.Module()
        module.register_buffer("frequencies", 1e-4 ** torch.linspace(0, 1, 33))
        before = module.get_buffer("frequencies").clone()
        terashard.synchronise_buffers(module)
        assert torch.equal(module.get_buffer("frequencies"), before)

    run_ranks(3, program)


def test_buffers_are_made_alike_over_a_mesh_and_not_beyond() -> None:
    def program(rank: int) -> tuple[float, int]:
        module: Any = nn.BatchNorm1d(3)
        module.running_mean.fill_(rank)
        module.num_batches_tracked.fill_(rank)
        rows = mesh_of(2, 2)
        terashard.synchronise_buffers(module, rows["shard"])
        partly = module.running_mean[0].item(), module.num_batches_tracked.item()
        terashard.synchronise_buffers(module, rows)
        assert module.running_mean[0].item() == 1.5
        assert module.num_batches_tracked.item() == 0
        return partly

    assert run_ranks(4, program) == [(0.5, 0), (0.5, 0), (2.5, 2), (2.5, 2)]


def test_replicas_can_be_given_the_values_of_the_first_after_sharding() -> None:
    def program(rank: int) -> dict[str, Tensor]:
        model: Any = seeded(Net(), rank)
        terashard.fully_shard(model, mesh=mesh_of(2, 1))
        terashard.synchronise(model)
        loss_of(model, words(rank, 0)).backward()
        return whole(model.state_dict())

    for found in run_ranks(2, program):
        same(found, dict(seeded(Net(), 0).state_dict()), within=0.0)


def test_parts_of_different_builds_cannot_be_mended_and_are_still_refused() -> None:
    def program(rank: int) -> None:
        model = terashard.fully_shard(seeded(Net(), rank), mesh=mesh_of(2))
        terashard.synchronise(model)
        loss_of(model, words(rank, 0)).backward()

    with pytest.raises(RunError, match="held different values"):
        run_ranks(2, program)


def test_replicas_that_were_born_of_different_random_states_are_named() -> None:
    def program(rank: int) -> None:
        with torch.device("meta"):
            model = Net().double()
        terashard.fully_shard(model, mesh=mesh_of(2, 1))
        generator = torch.Generator().manual_seed(rank)

        def fill(module: nn.Module) -> None:
            for p in module.parameters(recurse=False):
                nn.init.normal_(p, generator=generator)

        terashard.initialise(model, init=fill)
        loss_of(model, words(rank, 0)).backward()

    with pytest.raises(RunError, match=r"held different values of parameter embed\.weight"):
        run_ranks(2, program)


class Counting(Net):
    """Keeps something beside tensors."""

    def get_extra_state(self) -> Any:
        return {"steps": 3}

    def set_extra_state(self, state: Any) -> None:
        self.steps = state["steps"]


def test_what_modules_keep_beside_tensors_is_in_the_state_and_not_in_a_file(tmp_path: Path) -> None:
    def program(rank: int) -> Any:
        model: Any = seeded(Counting())
        terashard.fully_shard(model, mesh=mesh_of(2))
        found = terashard.full_state_dict(model, rank0_only=False)
        with pytest.raises(CheckpointError, match="_extra_state is a dict, and a safetensors file"):
            terashard.save_full(model, tmp_path / "state.safetensors")
        return found

    for found in run_ranks(2, program):
        assert found["_extra_state"] == {"steps": 3}
        assert found["embed.weight"].shape == (11, 6)


def test_whatever_fails_while_a_file_is_written_all_ranks_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a full disk was thought of: others left rank 1 waiting."""

    def broken(*_: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr("terashard.checkpoint.full.byte_view", broken)

    def program(rank: int) -> None:
        with pytest.raises(RunError, match="no room"):
            terashard.save_full(sharded(2), tmp_path / "state.safetensors")

    run_ranks(2, program)
    assert not list(tmp_path.iterdir())
