"""Who owns a parameter, where it stands, and what is refused."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from terashard.comm.mesh import Mesh
from terashard.comm.threads import ThreadWorld, run_threads
from terashard.errors import ConfigError, RunError
from terashard.shard.cut import make_units, named_parameters
from terashard.shard.precision import Precision
from terashard.shard.unit import ShardUnit
from tests.shard.toys import FLOAT64, Rank, named_modules, parameters_of


def alone() -> Mesh:
    return Mesh.of_threads(ThreadWorld(1), 0)


def cut(*named: tuple[str, nn.Module], ties: dict[str, str] | None = None) -> list[ShardUnit]:
    return make_units(named, mesh=alone(), precision=FLOAT64, ties=ties or {})


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_pieces_put_together_are_the_values_of_the_modules(shards: int) -> None:
    expected = parameters_of(named_modules())

    def work(world: ThreadWorld, rank: int) -> None:
        here = Rank.of(world, rank, shards=shards)
        found = here.values()
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert list(named_parameters(here.units)) == list(expected)

    run_threads(shards, work)


def test_pieces_are_those_of_torch_chunk() -> None:
    """7 rows over 3 shards are 3, 3 and 1; one row leaves two shards empty."""

    def work(world: ThreadWorld, rank: int) -> None:
        public = named_parameters(Rank.of(world, rank, shards=3).units)
        weight, one_row = public["first.linear.weight"], public["last.linear.weight"]
        assert weight.placements == (Replicate(), Shard(0))
        assert weight._local_tensor.shape == ((3, 3, 1)[rank], 5)
        assert weight.shape == (7, 5)
        assert one_row._local_tensor.shape == ((1, 0, 0)[rank], 7)
        assert public["first.gain"].placements == (Replicate(), Replicate())
        assert public["first.gain"]._local_tensor.shape == ()

    run_threads(3, work)


def test_a_shared_parameter_is_owned_by_the_first_unit_and_stands_everywhere() -> None:
    here = Rank.of(ThreadWorld(1), 0, shards=1, tied=True)
    first, middle, again, _ = here.units
    weight = next(p for p in middle.parameters if p.name == "middle.linear.weight")
    assert again.lenders == (middle,)
    assert first.lenders == middle.lenders == ()
    assert "again.linear.weight" not in named_parameters(here.units)
    assert here.named[2][1].linear.weight is here.named[1][1].linear.weight is weight.sharded
    middle.gather()
    middle.wait()
    assert here.named[2][1].linear.weight is here.named[1][1].linear.weight is weight.full


def test_a_parameter_shared_inside_a_unit_is_cut_once() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    (unit,) = cut(("block", module))
    assert [p.name for p in unit.parameters] == ["block.0.weight", "block.0.bias"]
    assert module[0].weight is module[1].weight is unit.parameters[0].sharded


def test_a_tie_may_be_told_by_any_name_of_the_parameter() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    (unit,) = cut(("block", module), ties={"block.1.weight": "embed.weight"})
    assert unit.parameters[0].tied_to == "embed.weight"


def test_a_tie_of_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(RunError, match=r"a\.wait is said to be tied to b\.weight, but no unit"):
        cut(("a", nn.Linear(2, 2)), ties={"a.wait": "b.weight"})


def test_a_module_is_cut_only_once() -> None:
    module = nn.Linear(2, 2)
    cut(("a", module))
    with pytest.raises(RunError, match=r"parameter a\.weight is a DTensor already"):
        cut(("a", module))


def test_an_integer_parameter_is_refused() -> None:
    module = nn.Module()
    module.table = nn.Parameter(torch.arange(3), requires_grad=False)
    with pytest.raises(RunError, match=r"parameter a\.table is torch\.int64"):
        cut(("a", module))


def test_a_persistent_buffer_is_refused_by_name() -> None:
    """Regression: it is in no checkpoint, so a resumed run silently began with another value."""
    with pytest.raises(RunError, match=r"a\.1\.running_mean is a persistent buffer, which no"):
        cut(("a", nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
    module = nn.Module()
    module.register_buffer("mask", torch.ones(2), persistent=False)
    module.register_buffer("nothing", None)
    cut(("a", module))


def test_a_unit_without_parameters_goes_through_all_verbs() -> None:
    (unit,) = cut(("empty", nn.Identity()))
    unit.gather()
    unit.wait()
    unit.zero_gradients()
    unit.release()
    unit.reduce("shard")
    unit.wait_reduced()


def test_a_transposed_parameter_keeps_its_values() -> None:
    module = nn.Linear(2, 3)
    with torch.no_grad():
        module.weight = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    (unit,) = cut(("a", module))
    assert torch.equal(unit.parameters[0].local, torch.arange(6.0).view(2, 3).t().double())


@pytest.mark.parametrize(
    ("compute", "master", "message"),
    [
        (torch.bfloat16, torch.bfloat16, "kept in torch.bfloat16"),
        (torch.float64, torch.float32, "no wider than the second"),
        (torch.int8, torch.float32, "must be a floating-point type"),
    ],
)
def test_a_precision_that_loses_bits_is_refused(
    compute: torch.dtype, master: torch.dtype, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Precision(compute=compute, master=master)
