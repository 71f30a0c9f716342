"""The state of a torch generator as JSON: a run goes on with the numbers that it would have drawn.

A state is a vector of bytes, written in base64. ``extra`` is one for all ranks: where states differ
from rank to rank, collect all of them and write a list, one for each rank.
"""

import base64

import torch
from torch import Tensor

from terashard.checkpoint.index import JSON
from terashard.errors import CheckpointError


def encode_torch_state(state: Tensor) -> str:
    """``generator.get_state()`` as base64."""
    return base64.b64encode(state.cpu().contiguous().numpy().tobytes()).decode("ascii")


def decode_torch_state(text: JSON) -> Tensor:
    """What ``generator.set_state`` takes."""
    try:
        data = base64.b64decode(text, validate=True) if isinstance(text, str) else None
    except ValueError:
        data = None
    if not data:
        raise CheckpointError("a torch random state is no base64 text; take another checkpoint")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
