"""Units built on meta: filled by name and rows, and refused while anything is unwritten."""

import re

import pytest
import torch
from torch import Tensor, nn

from terashard.comm.mesh import Mesh
from terashard.comm.threads import ThreadWorld, run_threads
from terashard.errors import RunError
from terashard.shard.cut import make_units
from terashard.shard.materialise import materialise, require_written
from terashard.shard.unit import ShardUnit
from tests.shard.toys import FLOAT64, First, Last, Middle, Rank, named_modules


def on_meta(world: ThreadWorld, rank: int) -> Rank:
    mesh = Mesh.of_threads(world, rank, shards=world.size)
    with torch.device("meta"):
        named: list[tuple[str, nn.Module]] = [
            ("first", First()),
            ("middle", Middle()),
            ("last", Last()),
        ]
    return Rank(mesh, named, make_units(named, mesh=mesh, precision=FLOAT64, ties={}))


def lone_unit() -> ShardUnit:
    return on_meta(ThreadWorld(1), 0).units[0]


def fill(name: str, shape: torch.Size, rows: tuple[int, int]) -> Tensor:
    """The values of the plain model, in another type than the shard's."""
    modules = dict(named_modules(dtype=torch.float32))
    unit, _, inside = name.partition(".")
    values = {**dict(modules[unit].named_parameters()), **dict(modules[unit].named_buffers())}
    assert values[inside].shape == shape
    return values[inside][rows[0] : rows[1]] if shape else values[inside]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_filled_unit_holds_the_values_of_a_built_one(shards: int) -> None:
    def work(world: ThreadWorld, rank: int) -> None:
        built, filled = Rank.of(world, rank, shards=shards), on_meta(world, rank)
        for unit in filled.units:
            materialise(unit, fill)
        require_written(filled.units)
        found, expected = filled.values(), built.values()
        assert all(torch.equal(found[n], expected[n].float().double()) for n in expected)
        assert torch.equal(filled.named[0][1].offset, torch.full((7,), 0.25))

    run_threads(shards, work)


def test_only_own_rows_are_asked_for() -> None:
    def work(world: ThreadWorld, rank: int) -> None:
        asked: dict[str, tuple[int, int]] = {}

        def note(name: str, shape: torch.Size, rows: tuple[int, int]) -> Tensor:
            asked[name] = rows
            return fill(name, shape, rows)

        for unit in on_meta(world, rank).units:
            materialise(unit, note)
        assert asked["first.linear.weight"] == ((0, 3), (3, 6), (6, 7))[rank]
        assert ("last.linear.weight" in asked) is (rank == 0)
        assert asked["first.gain"] == (0, 1)

    run_threads(3, work)


def test_an_unwritten_parameter_is_named() -> None:
    unit = lone_unit()
    for act in (unit.gather, lambda: require_written([unit])):
        with pytest.raises(RunError, match=r"parameter first\.gain was built on meta and never"):
            act()


def test_a_fill_that_fails_midway_leaves_the_rest_unwritten() -> None:
    unit = lone_unit()

    def fail(name: str, shape: torch.Size, rows: tuple[int, int]) -> Tensor:
        if name.endswith("bias"):
            raise KeyError(name)
        return fill(name, shape, rows)

    with pytest.raises(KeyError):
        materialise(unit, fail)
    with pytest.raises(RunError, match=r"parameter first\.linear\.bias was built on meta"):
        unit.gather()


def test_an_unwritten_buffer_is_named() -> None:
    unit = lone_unit()
    for parameter in unit.parameters:
        parameter.written = True
    with pytest.raises(RunError, match=r"buffer first\.offset was built on meta and never written"):
        require_written([unit])


@pytest.mark.parametrize("name", ["first.gain", "first.linear.weight", "first.offset"])
def test_a_wrong_shape_is_refused_with_the_name(name: str) -> None:
    def wrong(asked: str, shape: torch.Size, rows: tuple[int, int]) -> Tensor:
        return torch.ones(2, 2) if asked == name else fill(asked, shape, rows)

    with pytest.raises(RunError, match=re.escape(name) + r" was to be filled.*\(2, 2\) came"):
        materialise(lone_unit(), wrong)


def test_values_on_meta_are_refused() -> None:
    with pytest.raises(RunError, match="a tensor on meta came"):
        materialise(lone_unit(), lambda name, shape, rows: torch.empty(shape, device="meta"))


def test_a_gathered_unit_is_not_written() -> None:
    unit = Rank.of(ThreadWorld(1), 0, shards=1).units[0]
    unit.gather()
    with pytest.raises(RunError, match="unit first is GATHERING and cannot be written"):
        materialise(unit, fill)


def test_the_public_parameter_stays_the_same_object() -> None:
    """An optimizer built before the values came in must not lose its parameters."""
    unit = lone_unit()
    before = [p.sharded for p in unit.parameters]
    materialise(unit, fill)
    materialise(unit, fill)
    unit.gather()
    unit.wait()
    unit.release()
    assert all(a is b.sharded for a, b in zip(before, unit.parameters, strict=True))
