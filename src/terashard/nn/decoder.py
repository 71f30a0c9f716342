"""A stage of terashard's own decoder: a consecutive run of its units.

::

    embed │ layers.0 │ layers.1 │ … │ layers.L−1 │ head
    └──── first stage ────┘      …      └ last stage ┘

Parameter names are those of ``ModelSpec.unit_parameters``, whatever the cut. Under tied weights one
stage that has both ends has one parameter; a last stage apart has a copy of its own and says so in
``ties``.

Shapes: B sequences, n tokens of the slice, N tokens of the whole sequence, C channels, V words.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from terashard.nn.block import Block
from terashard.nn.embedding import TokenEmbedding
from terashard.nn.head import Head
from terashard.nn.protocols import TokenSlice
from terashard.spec.model import ModelSpec


class DecoderStage(nn.Module):
    """Some layers of a decoder; ``ends`` says whether the embedding and the head are part of it.

    Implements ``StageModule``. Called directly it runs whole sequences, without carries.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: range,
        *,
        ends: tuple[bool, bool],
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        first, last = ends
        self.width = spec.hidden_size
        self.embed = TokenEmbedding(spec, device) if first else None
        self.layers = nn.ModuleDict({str(i): Block(spec, device) for i in layers})
        self.head = Head(spec, device) if last else None
        self._tied = spec.tied
        if spec.tied and self.embed is not None and self.head is not None:
            self.head.output.weight = self.embed.tokens.weight

    def units(self) -> Sequence[tuple[str, nn.Module]]:
        """Global name and module of every unit, in order of use."""
        units: list[tuple[str, nn.Module]] = []
        if self.embed is not None:
            units.append(("embed", self.embed))
        units += [(f"layers.{i}", block) for i, block in self.layers.items()]
        if self.head is not None:
            units.append(("head", self.head))
        return units

    def has_head(self) -> bool:
        """Whether this stage is the last."""
        return self.head is not None

    def ties(self) -> Mapping[str, str]:
        """A last stage's own copy of the embedding's weight, under tied weights."""
        if self._tied and self.head is not None and self.embed is None:
            return {"head.output.weight": "embed.tokens.weight"}
        return {}

    def forward(self, x: Tensor) -> Tensor:
        """Run whole sequences: tokens [B, N] or hidden [B, N, C] to hidden, or logits [B, N, V]."""
        whole = TokenSlice(index=0, start=0, stop=x.shape[1], total=x.shape[1])
        for name, unit in self.units():
            x = cast(Tensor, unit(x) if name == "head" else unit(x, None, whole))
        return x
