"""A training loop of your own, over layers and a loss of your own.

Two stages, in two threads of this process. Under torchrun, one rank per process, only the mesh is
made differently: ``Mesh.of_processes(stages=2)``.
"""

from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from terashard import Mesh, Pipeline, Plan, StateCarry, run_threads

WIDTH, VOCABULARY, TOKENS = 32, 16, 24


class Recurrent(nn.Module):
    """A layer that can be cut into token slices: its state crosses the cut in a carry."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True, device="meta")

    def forward(self, x: Tensor, carry: StateCarry, where) -> Tensor:
        y, state = self.gru(x, carry.take(where))
        carry.put(where, state)
        return x + y

    def new_carry(self, batch, length, *, device, dtype) -> StateCarry:
        return StateCarry()


class Embed(nn.Embedding):
    def forward(self, x: Tensor, carry, where) -> Tensor:
        return super().forward(x)


class Half(nn.Module):
    """One of the two stages, without values yet; units are what sharding gathers together."""

    width = WIDTH

    def __init__(self, index: int) -> None:
        super().__init__()
        first = [("embed", Embed(VOCABULARY, WIDTH, device="meta"))] if index == 0 else []
        last = [("head", nn.Linear(WIDTH, VOCABULARY, device="meta"))] if index == 1 else []
        self.named_units = [*first, (f"layers.{index}", Recurrent()), *last]

    def units(self):
        return self.named_units

    def has_head(self) -> bool:
        return self.named_units[-1][0] == "head"

    def ties(self) -> dict[str, str]:
        return {}


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """A sum over tokens: terashard divides by how many there are in the whole step."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def fill(name: str, shape: torch.Size, rows: tuple[int, int]) -> Tensor:
    """The first values of a parameter: by its name, so that every rank draws the same ones."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    return 0.2 * torch.randn(shape, generator=generator)[slice(*rows)]


def train(world, rank: int) -> list[float]:
    mesh = Mesh.of_threads(world, rank, stages=2)
    plan = Plan.uniform(sequences=4, tokens=TOKENS, slices=3, stages=2)
    pipeline = Pipeline(Half, plan, mesh, loss=loss, fill=fill)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01, fused=True)
    text = torch.arange(TOKENS + 1).remainder(5).repeat(4, 1)  # 0 1 2 3 4 0 1 …
    losses = []
    for _ in range(30):
        losses.append(pipeline.step(text[:, :-1], text[:, 1:]).loss)
        optimizer.step()
    return losses


if __name__ == "__main__":
    first, *_, last = run_threads(2, train)[0]
    print(f"loss {first:.3f} -> {last:.3f} in 30 steps, 2 stages x 3 token slices")
    assert last < 0.5 * first
