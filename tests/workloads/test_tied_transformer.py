"""A Transformer whose embedding is its head, in two units, under activation checkpointing."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.shard.engines import seeded
from tests.workloads.harness import (
    OURS,
    REPLICAS,
    TORCH,
    Layout,
    Run,
    Sharder,
    equal_to_one_process,
    over,
)

WORDS, WIDTH, HEADS, LENGTH = 9, 8, 2, 5


class Layer(nn.Module):
    """No bias of keys: its gradient is zero but for rounding, which Adam would magnify."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Transformer(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.reentrant = reentrant

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        out: Tensor = self.head(x)
        return out


def train(run: Run) -> None:
    optimizer = run.optimizer_of(run.models[0].parameters())

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        words = torch.randint(0, WORDS, (2, LENGTH), generator=generator)
        return F.cross_entropy(model(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten())

    for _ in range(3):
        run.step(loss, optimizer)
    for (model,) in run.replicas.values():
        assert model.embed.weight is model.head.weight


def shard(models: list[Any], fully_shard: Sharder) -> None:
    """The two ends are units of their own; torch's engine wants what shares in one."""
    model = models[0]
    ours = fully_shard.layout.engine == "ours"
    for module in (model.embed, model.head) if ours else ([model.embed, model.head],):
        fully_shard(module)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)


@over(*OURS, REPLICAS, TORCH)
def test_tied_weights_across_units_under_checkpointing(optimizer: str, layout: Layout) -> None:
    equal_to_one_process(lambda: [seeded(Transformer(False))], shard, train, optimizer, layout)


@over(*OURS, TORCH)
def test_tied_weights_under_reentrant_checkpointing(optimizer: str, layout: Layout) -> None:
    equal_to_one_process(lambda: [seeded(Transformer(True))], shard, train, optimizer, layout)
