import json
import random

import numpy as np
import pytest
import torch

from terashard.checkpoint import random_state
from terashard.errors import CheckpointError


def through_json(value: object) -> object:
    return json.loads(json.dumps(value))


def test_a_torch_generator_goes_on_where_it_was() -> None:
    generator = torch.Generator().manual_seed(5)
    torch.randn(7, generator=generator)
    kept = through_json(random_state.encode_torch_state(generator.get_state()))
    expected = torch.randn(9, generator=generator)
    other = torch.Generator()
    other.set_state(random_state.decode_torch_state(kept))
    assert torch.randn(9, generator=other).equal(expected)


def test_a_python_generator_goes_on_where_it_was() -> None:
    generator = random.Random(5)
    generator.gauss()
    kept = through_json(random_state.encode_python_state(generator.getstate()))
    expected = [generator.gauss() for _ in range(9)]
    other = random.Random()
    other.setstate(random_state.decode_python_state(kept))
    assert [other.gauss() for _ in range(9)] == expected


@pytest.mark.parametrize("kind", ["PCG64", "MT19937", "Philox", "SFC64"])
def test_a_numpy_generator_goes_on_where_it_was(kind: str) -> None:
    generator = np.random.Generator(getattr(np.random, kind)(5))
    generator.normal(size=7)
    kept = through_json(random_state.encode_numpy_state(generator.bit_generator.state))
    expected = generator.normal(size=9)
    other = np.random.Generator(getattr(np.random, kind)())
    other.bit_generator.state = random_state.decode_numpy_state(kept)
    assert np.array_equal(other.normal(size=9), expected)


@pytest.mark.parametrize("text", ["", "no base64!", 5, None])
def test_what_is_no_torch_state_is_refused(text: object) -> None:
    with pytest.raises(CheckpointError, match="torch random state"):
        random_state.decode_torch_state(text)


@pytest.mark.parametrize("data", [[], [3, 4, None], None])
def test_what_is_no_python_state_is_refused(data: object) -> None:
    with pytest.raises(CheckpointError, match="Python random state"):
        random_state.decode_python_state(data)
