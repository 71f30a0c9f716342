"""What a birth holds, what it leaves alone, and what it refuses, besides equal values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import terashard
from terashard.errors import RunError
from tests.helpers.torch_threads import run_ranks
from tests.shard.engines import WIDTH, WORDS, Net, mesh_of, same, seeded, shard, whole

Fill = Callable[[nn.Module], None]


def on_meta(build: Callable[[], nn.Module] = Net) -> Any:
    with torch.device("meta"):
        return build()


def drawing(seed: int = 3) -> Fill:
    """A function that draws every parameter, from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)

    def fill(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.normal_(p, generator=generator)

    return fill


def eager(build: Callable[[], nn.Module] = Net) -> dict[str, Tensor]:
    model = build()
    with torch.no_grad():
        model.apply(drawing())
    return dict(model.state_dict())


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    assert [n for n in found if not torch.equal(found[n], expected[n])] == []


# ---- memory -------------------------------------------------------------------------------------


def test_a_birth_holds_no_more_than_the_root_and_one_unit_in_full() -> None:
    width, blocks = 32, 6

    def program(rank: int) -> tuple[int, int]:
        model = shard(on_meta(lambda: Net(blocks, width)), 2)
        storages: list[tuple[Any, int]] = []
        peak = 0

        def fill(module: nn.Module) -> None:
            nonlocal peak
            for p in module.parameters(recurse=False):
                p.fill_(1.0)
                storages.append((p.untyped_storage()._weak_ref(), p.nbytes))
            alive = [n for w, n in storages if not torch.UntypedStorage._expired(w)]
            peak = max(peak, sum(alive))

        terashard.initialise(model, init=fill)
        return peak, sum(n for _, n in storages)

    block = 4 * (4 * width * width + 3 * width)
    root = 4 * (2 * WORDS * width + WORDS)
    for peak, everything in run_ranks(2, program):
        assert everything == blocks * block + root
        assert block < peak <= block + root


# ---- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2)])
def test_a_birth_over_any_ranks_is_the_eager_build_to_the_bit(shape: tuple[int, ...]) -> None:
    def program(rank: int) -> dict[str, Tensor]:
        model = shard(on_meta(), *shape)
        terashard.initialise(model, init=drawing())
        return whole(model.state_dict())

    for found in run_ranks(torch.Size(shape).numel(), program):
        equal(found, eager())


def test_parameters_that_are_cut_by_columns_are_born_alike() -> None:
    def program(rank: int) -> dict[str, Tensor]:
        model = shard(on_meta(), 2, shard_placement_fn=lambda p: Shard(p.dim() - 1))
        terashard.initialise(model, init=drawing())
        return whole(model.state_dict())

    for found in run_ranks(2, program):
        equal(found, eager())


def test_modules_that_torch_resets_in_parts_are_born_as_they_are_built() -> None:
    """Attention draws a child's weight and then writes that child's bias itself."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)))

    def program(rank: int) -> dict[str, Tensor]:
        model = on_meta(build)
        for layer in model:
            terashard.fully_shard(layer, mesh=mesh_of(1))
        terashard.fully_shard(model, mesh=mesh_of(1))
        with torch.random.fork_rng():
            torch.manual_seed(5)
            terashard.initialise(model)
        return whole(model.state_dict())

    with torch.random.fork_rng():
        torch.manual_seed(5)
        expected = dict(build().state_dict())
    equal(run_ranks(1, program)[0], expected)


def test_buffers_of_torch_are_born_with_their_module() -> None:
    def program(rank: int) -> dict[str, Tensor]:
        model = on_meta(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
        terashard.fully_shard(model, mesh=mesh_of(2))
        terashard.initialise(model)
        return {name: buffer.clone() for name, buffer in model.named_buffers()}

    for found in run_ranks(2, program):
        equal(found, dict(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).named_buffers()))


class Tied(Net):
    """A net whose head reads the rows of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight


def test_a_shared_parameter_stays_shared_and_the_last_to_write_it_is_kept() -> None:
    def program(rank: int) -> dict[str, Tensor]:
        model = shard(on_meta(Tied), 2)
        terashard.initialise(model, init=drawing())
        assert model.head.weight is model.embed.weight
        return whole(model.state_dict())

    for found in run_ranks(2, program):
        equal(found, eager(Tied))


class Assigning(nn.Module):
    """A layer that writes as old code does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))

    def reset_parameters(self) -> None:
        self.weight.data = torch.arange(16.0).view(4, 4)


def test_memory_that_is_assigned_to_data_counts_as_written() -> None:
    def program(rank: int) -> Tensor:
        model = on_meta(lambda: nn.Sequential(Assigning()))
        terashard.fully_shard(model, mesh=mesh_of(2))
        terashard.initialise(model)
        return whole(model.state_dict())["0.weight"]

    for found in run_ranks(2, program):
        assert torch.equal(found, torch.arange(16.0).view(4, 4))


# ---- what has values already, and what is in no unit ---------------------------------------------


def test_what_has_values_keeps_them() -> None:
    def program(rank: int) -> Any:
        built = shard(seeded(Net()), 2)
        before = whole(built.state_dict())
        terashard.initialise(built, init=drawing())
        partly = on_meta()
        partly.head = seeded(nn.Linear(WIDTH, WORDS)).float()
        head = {name: p.detach().clone() for name, p in partly.head.named_parameters()}
        terashard.initialise(shard(partly, 2), init=drawing())
        same(whole(partly.head.state_dict()), head, within=0.0)
        return before, whole(built.state_dict())

    for before, after in run_ranks(2, program):
        equal(after, before)


def test_what_is_in_no_unit_is_born_too() -> None:
    def program(rank: int) -> Any:
        ignoring = on_meta()
        ignored = {ignoring.head.bias, ignoring.embed.weight}
        shard(ignoring, 2, ignored_params=ignored)
        without_root = on_meta()
        for block in without_root.blocks:
            terashard.fully_shard(block, mesh=mesh_of(2))
        for model in (ignoring, without_root):
            terashard.initialise(model, init=drawing())
            assert not isinstance(model.head.bias, DTensor)
        return whole(ignoring.state_dict()), whole(without_root.state_dict())

    for found in run_ranks(2, program):
        for state in found:
            equal(state, eager())


def test_what_is_shared_in_no_unit_stays_shared() -> None:
    def program(rank: int) -> dict[str, Tensor]:
        model = on_meta(Tied)
        for block in model.blocks:
            terashard.fully_shard(block, mesh=mesh_of(2))
        terashard.initialise(model, init=drawing())
        assert model.head.weight is model.embed.weight
        return whole(model.state_dict())

    for found in run_ranks(2, program):
        equal(found, eager(Tied))


def test_what_is_in_no_unit_and_nobody_writes_is_named() -> None:
    def all_but_the_head(module: nn.Module) -> None:
        if getattr(module, "out_features", None) != WORDS:
            drawing()(module)

    def program(rank: int) -> None:
        model = on_meta()
        shard(model, 2, ignored_params={model.head.weight, model.head.bias})
        with pytest.raises(RunError, match=r"head\.weight was built on meta, and nothing wrote it"):
            terashard.initialise(model, init=all_but_the_head)

    run_ranks(2, program)


class Redrawing(Net):
    """A net that draws the weights of its blocks once more."""

    def init_weights(self) -> None:
        for block in self.blocks:
            nn.init.normal_(block.up.weight)


def test_a_draw_into_a_unit_that_is_done_is_refused_not_drawn_alike_on_all_ranks() -> None:
    def program(rank: int) -> None:
        model = shard(on_meta(Redrawing), 2)
        with pytest.raises(RunError, match=r"normal_ draws parameter blocks\.0\.up\.weight"):
            terashard.initialise(model)

    run_ranks(2, program)
