"""Tiny models for whole pipelines, the same models uncut as witnesses, and data for them.

``Witness`` holds what one process computes on whole sequences with torch's own cross-entropy; every
layout must give its loss and gradients.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from terashard.nn.build import build_stage
from terashard.nn.carry import StateCarry
from terashard.nn.decoder import DecoderStage
from terashard.nn.init import initialise_
from terashard.nn.protocols import Carry, StageModule, TokenSlice
from terashard.plan.plan import Plan
from terashard.spec.model import ModelSpec

Family = Literal["llama", "gpt2"]
WORDS, WIDTH, LAYERS = 19, 16, 4


def tiny_spec(
    family: Family = "llama", *, tied: bool = False, kv_heads: int = 2, tokens: int = 8
) -> ModelSpec:
    """Four narrow layers of one of the two families, by default with grouped key/value heads."""
    llama = family == "llama"
    return ModelSpec(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_layers=LAYERS,
        num_heads=4,
        num_kv_heads=kv_heads,
        head_dim=4,
        mlp_size=24,
        max_length=tokens,
        norm="rms" if llama else "layer",
        positions="rotary" if llama else "learned",
        activation="swiglu" if llama else "gelu",
        bias=not llama,
        tied=tied,
    )


def decoder_stages(spec: ModelSpec, plan: Plan) -> Callable[[int], DecoderStage]:
    """Stage index → that part of the decoder, on meta."""

    def build(index: int) -> DecoderStage:
        layers = range(*plan.layers[index])
        return build_stage(spec, layers, first=index == 0, last=index == plan.stages - 1)

    return build


@dataclass(frozen=True)
class Batch:
    """Token ids and targets [S, N] of all data-parallel ranks together."""

    tokens: Tensor
    targets: Tensor

    def part(self, index: int, parts: int) -> tuple[Tensor, Tensor]:
        """The sequences of data-parallel rank ``index`` of ``parts``."""
        return self.tokens.chunk(parts)[index], self.targets.chunk(parts)[index]


def sample(sequences: int, tokens: int = 8, *, ignored: bool = False, seed: int = 1) -> Batch:
    """Random tokens; ``ignored``: ever more targets from the first sequence (none) to the last."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (sequences, tokens + 1), generator=generator)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if ignored:
        odds = torch.linspace(0, 1, sequences).unsqueeze(1).expand(sequences, tokens)
        y[torch.bernoulli(odds, generator=generator).bool()] = -100
    return Batch(x, y)


@dataclass(frozen=True)
class Witness:
    """Loss per target token and gradients by global name, from one uncut process."""

    loss: float
    tokens: int
    gradients: Mapping[str, Tensor]

    @property
    def norm(self) -> float:
        """Over all parameters, tied ones once."""
        return torch.stack([g.square().sum() for g in self.gradients.values()]).sum().sqrt().item()

    def error(self, found: Mapping[str, Tensor]) -> float:
        """Worst error of gradients that cover all of mine: max|Δ| / max(max|ref|, 1e-6·G).

        A tied weight's copy on the last stage is held against the one gradient of the two.
        """
        largest = max(g.abs().max().item() for g in self.gradients.values())
        missing = self.gradients.keys() - found.keys()
        assert not missing, f"no gradient came for {sorted(missing)}"
        worst = 0.0
        for name, gradient in found.items():
            reference = self.gradients[name if name in self.gradients else "embed.tokens.weight"]
            scale = max(reference.abs().max().item(), 1e-6 * largest)
            worst = max(worst, (gradient - reference).abs().max().item() / scale)
        return worst


@lru_cache(maxsize=64)
def witness(spec: ModelSpec, sequences: int, *, ignored: bool = False) -> Witness:
    """The decoder of ``spec``, uncut, on ``sample(sequences)``, in float64."""
    model = build_stage(spec, range(spec.num_layers), first=True, last=True)
    initialise_(model, spec, seed=0, dtype=torch.float64)
    batch = sample(sequences, spec.max_length, ignored=ignored)
    logits, targets = model(batch.tokens).flatten(0, 1), batch.targets.flatten()
    loss = F.cross_entropy(logits, targets, ignore_index=-100)
    loss.backward()
    count = int((targets != -100).sum())
    return Witness(loss.item(), count, _gradients(model.named_parameters()))


def _gradients(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in named
        if p.requires_grad
    }


class Embed(nn.Module):
    """Tokens [B, n] → [B, n, C]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, x: Tensor, carry: Carry | None, where: TokenSlice) -> Tensor:
        return self.table(x)


class Plain(nn.Module):
    """A feed-forward unit in which slices do not meet, and that knows nothing of carries."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor, carry: Carry | None, where: TokenSlice) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Recurrent(nn.Module):
    """A gated state that goes through the sequence token by token, across slices."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.new = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.start = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, carry: StateCarry | None, where: TokenSlice) -> Tensor:
        state = carry.take(where) if carry is not None else None
        state = self.start.expand(len(x), WIDTH) if state is None else state
        states = []
        for token in x.unbind(1):
            both = torch.cat([token, state], -1)
            gate = torch.sigmoid(self.gate(both))
            state = gate * state + (1 - gate) * torch.tanh(self.new(both))
            states.append(state)
        if carry is not None:
            carry.put(where, state)
        return x + torch.stack(states, 1)

    def new_carry(
        self, batch: int, length: int, *, device: torch.device, dtype: torch.dtype
    ) -> StateCarry:
        return StateCarry()


class UserStage:
    """A stage of one's own: some named units, without a head."""

    def __init__(self, named: list[tuple[str, nn.Module]], width: int = WIDTH) -> None:
        self.width, self._named = width, named

    def units(self) -> list[tuple[str, nn.Module]]:
        return self._named

    def has_head(self) -> bool:
        return False

    def ties(self) -> dict[str, str]:
        return {}


USER_UNITS: tuple[type[nn.Module], ...] = (Embed, Recurrent, Plain, Recurrent, Plain)


def user_units(dtype: torch.dtype = torch.float64) -> list[tuple[str, nn.Module]]:
    """The units of a model of one's own, with the same values at every call."""
    generator = torch.Generator().manual_seed(5)
    named = [(f"unit{i}", kind().to(dtype)) for i, kind in enumerate(USER_UNITS)]
    for _, unit in named:
        for parameter in unit.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_(0.4 * drawn)
    return named


def user_stages(
    stages: int, change: Callable[[list[tuple[str, nn.Module]]], None] = lambda named: None
) -> Callable[[int], StageModule]:
    """Stage index → its part of ``user_units``, after ``change`` to all of them."""

    def build(index: int) -> StageModule:
        named = user_units()
        change(named)
        ends = [len(named) * (s + 1) // stages for s in range(stages)]
        return UserStage(named[0 if index == 0 else ends[index - 1] : ends[index]])

    return build


def user_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Squared error of the channels' mean, summed over tokens; it ignores no target."""
    return (output.mean(-1) - targets / 10).square().sum()


def user_witness(
    batch: Batch, change: Callable[[list[tuple[str, nn.Module]]], None] = lambda named: None
) -> Witness:
    """The model of ``user_units``, uncut, under ``user_loss``, in float64."""
    named = user_units()
    change(named)
    x, total = batch.tokens, batch.tokens.shape[1]
    for _, unit in named:
        x = unit(x, None, TokenSlice(index=0, start=0, stop=total, total=total))
    loss = user_loss(x, batch.targets) / batch.targets.numel()
    if loss.requires_grad:
        loss.backward()
    parameters = ((f"{u}.{n}", p) for u, unit in named for n, p in unit.named_parameters())
    return Witness(loss.item(), batch.targets.numel(), _gradients(parameters))
