r"""Random states as JSON, for ``extra``: a run that goes on draws the numbers it would have drawn.

A torch state is a vector of bytes, written in base64. Python's is nested tuples, written as lists.
NumPy's is a mapping of integers of any size and, for some bit generators, arrays.

``extra`` is that of the first rank. A torch state that differs from rank to rank is better passed
to ``save`` as a piece of its own, named after what it belongs to: it is a uint8 tensor.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
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


def encode_python_state(state: Sequence[Any]) -> JSON:
    """``random.Random.getstate()`` as lists."""
    version, numbers, gauss = state
    return [version, list(numbers), gauss]


def decode_python_state(data: JSON) -> tuple[Any, ...]:
    """What ``random.Random.setstate`` takes."""
    if not isinstance(data, Sequence) or len(data) != 3 or not isinstance(data[1], Sequence):
        raise CheckpointError("a Python random state is no list of three; take another checkpoint")
    return data[0], tuple(data[1]), data[2]


def encode_numpy_state(state: Mapping[str, Any]) -> dict[str, JSON]:
    """``generator.bit_generator.state`` with arrays as lists beside their type."""
    return {key: _encode(value) for key, value in state.items()}


def decode_numpy_state(data: Mapping[str, JSON]) -> dict[str, Any]:
    """What ``generator.bit_generator.state`` is set to."""
    return {key: _decode(value) for key, value in data.items()}


def _encode(value: Any) -> JSON:
    if isinstance(value, Mapping):
        return encode_numpy_state(value)
    if isinstance(value, np.ndarray):
        return {"array": str(value.dtype), "values": value.tolist()}
    if isinstance(value, np.generic):
        item: JSON = value.item()
        return item
    plain: JSON = value
    return plain


def _decode(value: JSON) -> Any:
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"array", "values"}:
        return np.array(value["values"], dtype=str(value["array"]))
    return decode_numpy_state(value)
