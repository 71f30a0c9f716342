"""Units of one tree over different ranks, and names that stand in the way of others."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import Shard

import terashard
from terashard.errors import ConfigError
from tests.helpers.torch_threads import run_ranks
from tests.shard.engines import mean_gradients, mesh_of, same, whole


class Experts(nn.Module):
    """Dense in, an expert of this group of ranks, dense out."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in ("up", "expert", "down"):
            layer = nn.Linear(width, width, bias=False, dtype=torch.float64)
            with torch.no_grad():
                layer.weight.copy_(
                    torch.randn(width, width, generator=generator, dtype=torch.float64)
                )
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.expert(torch.tanh(self.up(x)))))
        return out


def batch(rank: int, width: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3, width, generator=generator, dtype=torch.float64)


def expert_of(group: int) -> Experts:
    model = Experts()
    with torch.no_grad():
        model.expert.weight.mul_(1.0 + group)
    return model


def over(mesh: DeviceMesh, chosen: set[nn.Parameter]) -> Any:
    """A placement function that makes its answer anew for every parameter."""

    def placed(parameter: nn.Parameter) -> Any:
        if parameter not in chosen:
            return None
        info = FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0)
        return terashard.ShardPlacementResult(Shard(0), info)

    return placed


@pytest.mark.parametrize("smaller", [None, 2])
def test_experts_differ_between_groups_of_ranks_and_train(smaller: int | None) -> None:
    """Ranks 0 and 2 share out one expert, ranks 1 and 3 another; the rest is everyone's."""

    def program(rank: int) -> Any:
        model = expert_of(rank % 2)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
        placed = over(mesh["data"], set(model.expert.parameters()))
        arguments: Any = {} if smaller is None else {"reshard_after_forward": smaller}
        inner = terashard.fully_shard(
            model, mesh=mesh_of(4), shard_placement_fn=placed, **arguments
        )
        root = terashard.fully_shard(nn.Sequential(inner), mesh=mesh_of(4))
        for _ in range(2):
            root.zero_grad()
            root(batch(rank)).square().sum().backward()
        return whole({"": model.expert.weight.grad})[""], whole({"": model.up.weight.grad})[""]

    def exact(group: int, rank: int) -> Any:
        model = expert_of(group)
        return mean_gradients(model, [lambda m: m(batch(rank)).square().sum()])

    for rank, (expert, up) in enumerate(run_ranks(4, program)):
        own = [exact(r % 2, r)["expert.weight"] for r in (rank % 2, rank % 2 + 2)]
        same(expert, (own[0] + own[1]) / 2)
        same(up, sum(exact(r % 2, r)["up.weight"] for r in range(4)) / 4)


def test_one_unit_for_every_mesh_however_its_description_is_made() -> None:
    """By the identity of a description that was gone, parameters went to another's ranks."""

    def program(rank: int) -> Any:
        layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
        chosen = list(layers.parameters())
        names = ("a", "b", "b")

        def placed(parameter: nn.Parameter) -> Any:
            index = next(i for i, one in enumerate(chosen) if one is parameter)
            info = FSDPMeshInfo(mesh=mesh[names[index % 3]], shard_mesh_dim=0)
            return terashard.ShardPlacementResult(Shard(0), info)

        terashard.fully_shard(layers, mesh=mesh_of(2), shard_placement_fn=placed)
        found = [p.device_mesh.mesh_dim_names[0] for p in layers.parameters()]  # type: ignore[attr-defined]
        return found, len(layers._sharding.units)

    for found, units in run_ranks(2, program):
        assert found == [("a", "b", "b")[index % 3] for index in range(40)]
        assert units == 2


def test_a_smaller_group_must_divide_the_ranks_of_every_unit() -> None:
    def program(rank: int) -> None:
        model = Experts(12)
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("data", "expert"))
        placed = over(mesh["data"], set(model.expert.parameters()))
        with pytest.raises(ConfigError, match=r"= 2 should divide the 3 ranks .* expert\.weight"):
            terashard.fully_shard(
                model, mesh=mesh_of(6), shard_placement_fn=placed, reshard_after_forward=2
            )

    run_ranks(6, program)


class Named(nn.Module):
    """Three layers, the second called ``name``; in a ModuleDict if that allows the name alone."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.order = ("a", name, "c")
        self.parts = nn.ModuleDict() if name == "my block" else None
        generator = torch.Generator().manual_seed(0)
        for part in self.order:
            layer = nn.Linear(6, 6).double()
            with torch.no_grad():
                for p in layer.parameters():
                    p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
            (self if self.parts is None else self.parts).add_module(part, layer)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.order:
            x = torch.tanh(self.layer(part)(x))
        return x

    def layer(self, part: str) -> nn.Module:
        return (self if self.parts is None else self.parts).get_submodule(part)


@pytest.mark.parametrize("name", ["root", "my block", "a#1", "µ"])
def test_a_module_may_be_called_anything(name: str) -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        total: Tensor = model(batch(rank, 6)).square().sum()
        return total

    def program(rank: int) -> Any:
        model = Named(name)
        for part in ("a", name):
            terashard.fully_shard(model.layer(part), mesh=mesh_of(2))
        terashard.fully_shard(model, mesh=mesh_of(2))
        for _ in range(2):
            model.zero_grad()
            loss(model, rank).backward()
        return whole({n: p.grad for n, p in model.named_parameters()})

    exact = mean_gradients(Named(name), [lambda m, r=r: loss(m, r) for r in (0, 1)])
    for found in run_ranks(2, program):
        same(found, exact)
