import json

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


@pytest.mark.parametrize("text", ["", "no base64!", 5, None])
def test_what_is_no_torch_state_is_refused(text: object) -> None:
    with pytest.raises(CheckpointError, match="torch random state"):
        random_state.decode_torch_state(text)
