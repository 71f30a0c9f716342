"""The first unit: token ids to channels, with learned positions where the model has them.

Shapes: B sequences, n tokens of the slice, C channels.
"""

from typing import cast

import torch
from torch import Tensor, nn

from terashard.errors import DataError
from terashard.nn.protocols import Carry, TokenSlice
from terashard.spec.model import ModelSpec


class TokenEmbedding(nn.Module):
    """Token embedding plus, under learned positions, that of each token's place in its sequence."""

    def __init__(self, spec: ModelSpec, device: torch.device | str | None = None) -> None:
        super().__init__()
        width = spec.hidden_size
        self.tokens = nn.Embedding(spec.vocab_size, width, device=device)
        self.positions: nn.Embedding | None = None
        if spec.positions == "learned":
            self.positions = nn.Embedding(spec.max_length, width, device=device)

    def forward(self, tokens: Tensor, carry: Carry | None, where: TokenSlice) -> Tensor:
        """[B, n] → [B, n, C]."""
        check_ids(tokens, self.tokens.num_embeddings)
        x = cast(Tensor, self.tokens(tokens))
        if self.positions is None:
            return x
        if where.total > self.positions.num_embeddings:
            raise DataError(
                f"a sequence has {where.total} tokens, but the model knows"
                f" {self.positions.num_embeddings} positions; shorten batch.tokens or raise"
                " model.max_length"
            )
        return x + self.positions.weight[where.start : where.stop]

    def new_carry(
        self, batch: int, length: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """None: slices do not meet here."""
        return


def check_ids(tokens: Tensor, vocab_size: int) -> None:
    """Raise ``DataError`` for a token id outside ``[0, vocab_size)``.

    Only on the CPU: on an accelerator the kernels assert it, and looking here would wait for the
    device.
    """
    if tokens.device.type != "cpu" or not tokens.numel():
        return
    least, most = (int(t) for t in tokens.aminmax())
    if least < 0 or most >= vocab_size:
        raise DataError(
            f"token id {least if least < 0 else most} is outside the vocabulary of {vocab_size}"
            " tokens; prepare the data with the model's tokenizer, or set model.vocab_size"
        )
