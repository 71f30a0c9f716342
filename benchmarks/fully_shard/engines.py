"""The model, and the engines that train it: DDP, torch's FSDP1 and FSDP2, and ours.

Every engine has the same model, data, optimizer class and flags. torch's are set up as its
documentation advises: blocks as units, the next block's gather named in advance, no sums but for
the last micro-batch, and in keep mode nothing let go of between micro-batches.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import terashard

LAYERS, WIDTH, HEADS, WORDS, POSITIONS = 12, 512, 8, 8192, 1024
NAMES = ("ddp", "fsdp1", "fsdp1_kept", "fsdp2", "fsdp2_kept", "ours", "ours_kept")


class Block(nn.Module):
    """Attention and MLP, both beside the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] to the same."""
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """46 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """[batch, tokens] to logits."""
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass
class Engine:
    """One engine on this rank."""

    name: str
    model: Any
    optimizer: torch.optim.Optimizer
    quiet: Callable[[bool], AbstractContextManager[None]]
    """Around the forward and backward of a micro-batch; its argument: whether it is the last."""

    def step(self, batches: list[Tensor]) -> float:
        """One optimizer step over the micro-batches; the mean loss."""
        total = 0.0
        for index, batch in enumerate(batches):
            with self.quiet(index == len(batches) - 1):
                logits = self.model(batch)
                loss = F.cross_entropy(logits.flatten(0, 1), batch.flatten()) / len(batches)
                loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def norm(self, batch: Tensor) -> float:
        """The gradient norm of one micro-batch, in float64; nothing is stepped.

        A float32 norm over millions of elements, as torch's clipping takes it, is off in the fifth
        digit, and differently for whole tensors and for halves.
        """
        logits = self.model(batch)
        F.cross_entropy(logits.flatten(0, 1), batch.flatten()).backward()
        square = torch.zeros((), dtype=torch.float64)
        for parameter in self.model.parameters():
            gradient = parameter.grad
            if gradient is not None:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                square += local.double().square().sum()
        if self.name != "ddp":  # each rank has other rows
            dist.all_reduce(square)
        self.optimizer.zero_grad()
        return float(square.sqrt())


def build(name: str) -> Engine:
    """The engine ``name`` over all ranks, from the same values."""
    torch.manual_seed(0)
    model: Any = Model()
    quiet: Callable[[bool], AbstractContextManager[None]] = _always
    kept = name.endswith("_kept")
    if name == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
        quiet = _no_sync(model)
    elif name.startswith("fsdp1"):
        model = _fsdp1(model, kept)
        quiet = _no_sync(model)
    elif name.startswith(("fsdp2", "ours")):
        engine: Any = fsdp if name.startswith("fsdp2") else terashard
        for block in model.blocks:
            engine.fully_shard(block, reshard_after_forward=not kept)
        engine.fully_shard(model, reshard_after_forward=False if kept else None)
        if name.startswith("fsdp2") and not kept:
            for block, following in zip(model.blocks, list(model.blocks)[1:], strict=False):
                block.set_modules_to_forward_prefetch([following])
        quiet = _setters(model, kept)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return Engine(name, model, optimizer, quiet)


def gathers(engine: Engine, batch: Tensor) -> dict[str, float]:
    """Gathers of every unit in one step (torch's: the mean over all units)."""
    if engine.name.startswith("ours"):
        units = {u.name: u for u in engine.model._own.root.units}
        before = {name: unit.traffic.gathers for name, unit in units.items()}
        engine.step([batch])
        return {name: unit.traffic.gathers - before[name] for name, unit in units.items()}
    counted: list[str] = []
    names = ("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_base")
    with contextlib.ExitStack() as stack:
        for name in names:
            if hasattr(dist, name):
                stack.enter_context(_counting(name, counted))
        engine.step([batch])
    return {"mean_per_unit": len(counted) / (LAYERS + 1)}


@contextlib.contextmanager
def _counting(name: str, counted: list[str]) -> Iterator[None]:
    plain = getattr(dist, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        counted.append(name)
        return plain(*args, **kwargs)

    setattr(dist, name, counting)
    try:
        yield
    finally:
        setattr(dist, name, plain)


def _fsdp1(model: nn.Module, kept: bool) -> Any:
    strategies = fsdp.ShardingStrategy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fsdp.FullyShardedDataParallel(
            model,
            sharding_strategy=strategies.SHARD_GRAD_OP if kept else strategies.FULL_SHARD,
            auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, Block),
            backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_PRE,
            forward_prefetch=True,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )


@contextlib.contextmanager
def _always(last: bool) -> Iterator[None]:
    yield


def _no_sync(model: Any) -> Callable[[bool], AbstractContextManager[None]]:
    return lambda last: contextlib.nullcontext() if last else model.no_sync()


def _setters(model: Any, kept: bool) -> Callable[[bool], AbstractContextManager[None]]:
    @contextlib.contextmanager
    def quiet(last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)
        if kept:
            model.set_reshard_after_backward(last)
        yield

    return quiet
