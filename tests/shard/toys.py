"""A small model of awkward shapes, its plain twin as the witness, and a step of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from terashard.comm.mesh import Mesh
from terashard.comm.threads import ThreadWorld
from terashard.shard.cut import make_units
from terashard.shard.precision import Precision
from terashard.shard.unit import ShardUnit

FLOAT64 = Precision(compute=torch.float64, master=torch.float64)
ROWS = 12
WIDTH = 5


class First(nn.Module):
    """[rows, 5] → [rows, 7]; a 0-dim parameter, a buffer, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 7)
        self.gain = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.full((7,), 0.25), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.gain + self.offset.to(x.dtype)


class Middle(nn.Module):
    """[rows, 7] → [rows, 7]; the bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.linear = nn.Linear(7, 7)
        self.linear.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Last(nn.Module):
    """[rows, 7] → [rows, 1]; one row is less than any number of shards above one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def named_modules(
    *, tied: bool = False, dtype: torch.dtype = torch.float64
) -> list[tuple[str, nn.Module]]:
    """The three units with the same values at every call; tied: the middle twice, as two units."""
    modules: list[nn.Module] = [First(), Middle(), Last()]
    names = ["first", "middle", "last"]
    if tied:
        again = Middle()
        again.linear.weight = modules[1].linear.weight  # type: ignore[assignment, union-attr]
        modules.insert(2, again)
        names.insert(2, "again")
    generator = torch.Generator().manual_seed(7)
    for module in modules:
        module.to(dtype)
        for parameter in module.parameters():
            with torch.no_grad():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.5 * drawn)
    return list(zip(names, modules, strict=True))


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs [ROWS, 5] and targets [ROWS, 1] of one step, the same numbers in every type."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randn(ROWS, 1, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def loss_of(modules: Sequence[nn.Module], x: Tensor, y: Tensor) -> Tensor:
    """Squared error summed over these rows, divided by the rows of the whole batch."""
    for module in modules:
        x = module(x)
    return F.mse_loss(x, y, reduction="sum") / ROWS


def parameters_of(named: Sequence[tuple[str, nn.Module]]) -> dict[str, nn.Parameter]:
    """Global name → parameter of plain modules, shared ones once."""
    seen: dict[str, nn.Parameter] = {}
    for unit, module in named:
        for name, parameter in module.named_parameters(prefix=unit):
            if all(parameter is not other for other in seen.values()):
                seen[name] = parameter
    return seen


@dataclass
class Rank:
    """One rank of a thread mesh, with the model cut over it."""

    mesh: Mesh
    named: list[tuple[str, nn.Module]]
    units: list[ShardUnit] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        world: ThreadWorld,
        rank: int,
        *,
        shards: int,
        precision: Precision = FLOAT64,
        tied: bool = False,
        each_micro: bool = False,
        slots: Mapping[str, int] | None = None,
    ) -> "Rank":
        mesh = Mesh.of_threads(world, rank, shards=shards, replicas=world.size // shards)
        return cls.on(mesh, precision=precision, tied=tied, each_micro=each_micro, slots=slots)

    @classmethod
    def on(
        cls,
        mesh: Mesh,
        *,
        precision: Precision = FLOAT64,
        tied: bool = False,
        each_micro: bool = False,
        slots: Mapping[str, int] | None = None,
    ) -> "Rank":
        named = named_modules(tied=tied, dtype=precision.master)
        units = make_units(
            named, mesh=mesh, precision=precision, ties={}, each_micro=each_micro, slots=slots
        )
        return cls(mesh, named, units)

    def rows(self, whole: Tensor) -> Tensor:
        """This data-parallel rank's part of a batch."""
        data = self.mesh.data
        return whole.chunk(data.size)[data.rank]

    def gather(self) -> None:
        for unit in self.units:
            unit.gather()
        for unit in self.units:
            unit.wait()

    def step(self, x: Tensor, y: Tensor, micro_batches: int = 2) -> float:
        """Gradients of this rank's rows, reduced; the loss of these rows."""
        total = 0.0
        self.gather()
        for unit in self.units:
            unit.zero_gradients()
        modules = [module for _, module in self.named]
        parts = zip(
            self.rows(x).chunk(micro_batches), self.rows(y).chunk(micro_batches), strict=True
        )
        for a, b in parts:
            loss = loss_of(modules, a.to(self.units[0].precision.compute), b)
            loss.backward()
            total += loss.item()
        for unit in reversed(self.units):
            unit.release()
            unit.reduce("shard")
            unit.reduce("replica")
        for unit in self.units:
            unit.wait_reduced()
        return total

    def whole(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The pieces of all shards put together, by parameter."""
        answer = {}
        for unit in self.units:
            for p in unit.parameters:
                if p.name in local:
                    full = torch.zeros(p.shape, dtype=local[p.name].dtype)
                    p.own_rows(full).copy_(local[p.name])
                    if not p.is_scalar:
                        self.mesh.shard_gather.gather_rows([full]).wait()
                    answer[p.name] = full
        return answer

    def values(self) -> dict[str, Tensor]:
        """Full values of all parameters."""
        return self.whole({p.name: p.local for unit in self.units for p in unit.parameters})

    def reduced(self) -> dict[str, Tensor]:
        """Full values of all gradients, read from the public parameters."""
        return self.whole(
            {
                p.name: p.sharded.grad._local_tensor
                for unit in self.units
                for p in unit.parameters
                if p.sharded.grad is not None
            }
        )


def reference(step: int = 0, *, tied: bool = False) -> dict[str, Tensor]:
    """Gradients of the plain model on the whole batch; zeros where nothing flows."""
    named = named_modules(tied=tied)
    loss_of([module for _, module in named], *batch(step)).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in parameters_of(named).items()
        if p.requires_grad
    }


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], within: float) -> None:
    """Compare by max|Δ| over max(max|expected|, 1e-6 of the model's largest)."""
    assert found.keys() == expected.keys()
    largest = max(e.abs().max().item() for e in expected.values())
    for name, e in expected.items():
        scale = max(e.abs().max().item(), 1e-6 * largest)
        error = (found[name] - e).abs().max().item() / scale
        assert error <= within, f"{name}: {error:.2e}"
