"""Units by class, by size and by function: which modules they are, and what is said of them."""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terashard
from terashard.errors import ConfigError
from terashard.shard.policy import UnevenUnitsWarning, describe_units, shard_where
from tests.shard.engines import Block, Here, Net, mesh_of, run, same, seeded, whole, words


class Deep(nn.Module):
    """Modules of 20, 2 x 20, 12 and 6 elements, and a list that does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.listed = nn.ModuleList([nn.Linear(3, 3), nn.Linear(2, 2)])
        self.own = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.pair(self.first(x))
        return out


def units_of(choose: Any, build: Callable[[], nn.Module] = Deep) -> dict[str, int]:
    """Unit → elements, as their table says; the warning of uneven ones aside."""

    def program(here: Here) -> dict[str, int]:
        shard_where(here.model, choose, mesh=mesh_of(1))
        lines = [line.split() for line in describe_units(here.model).splitlines()[1:]]
        return {name: int(count) for name, count, *_ in lines}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnevenUnitsWarning)
        return dict(run("ours", program, 1, build)[0])


@pytest.mark.parametrize(
    ("least", "expected"),
    [
        (1, {"first": 20, "pair.0": 20, "pair.1": 20, "listed.0": 12, "listed.1": 6}),
        (7, {"first": 20, "pair.0": 20, "pair.1": 20, "listed.0": 12}),
        (13, {"first": 20, "pair.0": 20, "pair.1": 20}),
        (21, {"pair": 40}),
        (40, {"pair": 40}),
    ],
)
def test_units_by_size_are_the_smallest_modules_that_reach_it(
    least: int, expected: dict[str, int]
) -> None:
    found = units_of(terashard.of_size(least))
    assert found == {"root": 80 - sum(expected.values()), **expected}


def test_what_inner_units_hold_does_not_count_again() -> None:
    class Outer(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 4), nn.Linear(1, 1))

    # the inner layer of 20 is a unit; what is left of the outer module, 2, is too little
    found = units_of(terashard.of_size(20), lambda: nn.Sequential(Outer()))
    assert found == {"0.0": 20, "root": 2}


def test_a_choice_by_size_keeps_nothing_and_serves_many_models() -> None:
    choose = terashard.of_size(13)
    model = Deep()
    gone = weakref.ref(model.first)
    assert choose("first", model.first)
    assert choose("first", model.first)
    del model
    gc.collect()
    assert gone() is None
    assert units_of(choose) == units_of(choose) == units_of(terashard.of_size(13))


def test_units_by_several_classes_inner_ones_first() -> None:
    class Outer(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 4), nn.ReLU())
            self.own = nn.Parameter(torch.zeros(2))

    found = units_of(
        terashard.of_class(Outer, nn.Linear), lambda: nn.Sequential(Outer(), nn.Linear(1, 1))
    )
    assert found == {"0.0": 20, "0": 2, "1": 2, "root": 0}


def test_a_module_that_stands_twice_is_one_unit() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(4, 4)
        return nn.Sequential(layer, layer, nn.Linear(4, 4))

    assert units_of(terashard.of_class(nn.Linear), build) == {"0": 20, "2": 20, "root": 0}


def test_a_module_that_is_sharded_already_stays_as_it_is() -> None:
    def program(here: Here) -> bool:
        model: Any = here.model
        terashard.fully_shard(model.blocks[0], mesh=mesh_of(2), reshard_after_forward=False)
        shard_where(model, terashard.of_class(Block), mesh=mesh_of(2))
        rules = [block._sharding.rules.reshard_after_forward for block in model.blocks]
        return rules == [False, None, None]

    assert run("ours", program, 2, lambda: seeded(Net())) == [True, True]


def test_arguments_are_those_of_fully_shard() -> None:
    def program(here: Here) -> Any:
        model: Any = here.model
        found = shard_where(
            model, terashard.of_class(Block), mesh=mesh_of(2, 2), reshard_after_forward=False
        )
        assert found is model
        model(words(here.rank, 0))
        assert type(model.blocks[0].up.weight) is nn.Parameter  # kept after forward
        model.reshard()
        for block in model.blocks:
            block.reshard()
        return whole(model.state_dict())

    for found in run("ours", program, 4, lambda: seeded(Net())):
        same(found, dict(seeded(Net()).state_dict()))


def test_the_table_adds_up_and_names_modules_of_one_unit_together() -> None:
    def program(here: Here) -> str:
        model: Any = here.model
        terashard.fully_shard([model.blocks[0], model.blocks[2]], mesh=mesh_of(2))
        terashard.fully_shard(model, mesh=mesh_of(2))
        return describe_units(model)

    table = run("ours", program, 2, lambda: seeded(Net()))[0].splitlines()
    rows = {line[:32].strip(): line[32:].split() for line in table[1:]}
    assert set(rows) == {"blocks.0 + blocks.2", "root"}
    assert rows["blocks.0 + blocks.2"][0] == "324"
    assert sum(int(row[0]) for row in rows.values()) == sum(p.numel() for p in Net().parameters())
    assert sum(int(row[-1].removesuffix("%")) for row in rows.values()) == 100


def test_one_unit_of_all_is_warned_of() -> None:
    def program(here: Here) -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        with pytest.warns(UnevenUnitsWarning, match=r"unit 0 holds 100% of the parameters"):
            shard_where(model, terashard.of_class(nn.Linear), mesh=mesh_of(1))

    run("ours", program, 1, Net)


def test_even_units_are_not_warned_of() -> None:
    def program(here: Here) -> None:
        shard_where(here.model, terashard.of_class(Block), mesh=mesh_of(1))  # warnings are errors

    run("ours", program, 1, Net)


def test_a_choice_that_finds_nothing_says_so_before_anything_is_sharded() -> None:
    def program(here: Here) -> None:
        with pytest.raises(ConfigError, match="no module inside this Net was chosen"):
            shard_where(here.model, terashard.of_class(nn.Conv2d), mesh=mesh_of(1))
        assert type(here.model) is Net

    run("ours", program, 1, Net)
