"""Initial values: the same numbers however layers and rows are split."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from terashard.nn.build import build_stage
from terashard.nn.init import Initialiser, initialise_
from tests.nn.witness import GPT2, LLAMA


@pytest.mark.parametrize("cuts", [[0, 29], [0, 10, 29], [0, 0, 28, 29, 29]])
def test_rows_are_cut_from_the_same_tensor(cuts: list[int]) -> None:
    fill, name, shape = Initialiser(LLAMA, 7), "embed.tokens.weight", (29, 24)
    pieces = [fill(name, shape, (a, b)) for a, b in pairwise(cuts)]
    whole = fill(name, shape, (0, 29))
    assert torch.equal(torch.cat(pieces), whole)
    assert whole.dtype == torch.float32


def test_stages_hold_what_the_whole_model_holds() -> None:
    whole = build_stage(GPT2, range(3), first=True, last=True)
    initialise_(whole, GPT2, seed=7)
    expected = dict(whole.named_parameters())
    for k in range(3):
        stage = build_stage(GPT2, range(k, k + 1), first=k == 0, last=k == 2)
        initialise_(stage, GPT2, seed=7)
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, expected[name]), name


def test_values_depend_on_seed_and_name_alone() -> None:
    name, shape = "layers.0.mlp.up.weight", (40, 24)
    value = Initialiser(LLAMA, 1)(name, shape, (0, 40))
    torch.rand(3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(value, Initialiser(LLAMA, 1)(name, shape, (0, 40)))
    assert not torch.equal(value, Initialiser(LLAMA, 2)(name, shape, (0, 40)))
    assert not torch.equal(value, Initialiser(LLAMA, 1)("layers.1.mlp.up.weight", shape, (0, 40)))


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    initialise_(build_stage(LLAMA, range(3), first=True, last=True), LLAMA, seed=0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("layers.2.attention.query.weight", 0.02),
        ("head.output.weight", 0.02),
        ("embed.positions.weight", 0.02),
        ("layers.2.attention.output.weight", 0.02 / math.sqrt(6)),
        ("layers.2.mlp.down.weight", 0.02 / math.sqrt(6)),
    ],
)
def test_matrices_are_normal_and_residual_projections_narrower(name: str, std: float) -> None:
    value = Initialiser(GPT2, 0)(name, (300, 300), (0, 300))
    assert float(value.std()) == pytest.approx(std, rel=0.02)
    assert float(value.mean()) == pytest.approx(0, abs=std / 50)


def test_norm_weights_are_one_and_biases_zero() -> None:
    fill = Initialiser(GPT2, 0)
    for name in ("layers.0.attention_norm", "layers.1.mlp_norm", "head.norm"):
        assert fill(f"{name}.weight", (24,), (3, 9)).tolist() == [1.0] * 6
        assert fill(f"{name}.bias", (24,), (3, 9)).tolist() == [0.0] * 6
    assert fill("layers.0.attention.key.bias", (24,), (0, 24)).tolist() == [0.0] * 24


def test_a_tied_head_starts_as_the_embedding() -> None:
    shape, rows = (29, 24), (4, 20)
    for tied in (True, False):
        fill = Initialiser(replace(LLAMA, tied=tied), 0)
        head, embed = (fill(n, shape, rows) for n in ("head.output.weight", "embed.tokens.weight"))
        assert torch.equal(head, embed) is tied


def test_initialising_keeps_shared_parameters_shared() -> None:
    tied = replace(LLAMA, tied=True)
    stage = build_stage(tied, range(3), first=True, last=True)
    initialise_(stage, tied, seed=0, dtype=torch.float64)
    assert stage.head.output.weight is stage.embed.tokens.weight
    assert all(p.dtype == torch.float64 and not p.is_meta for p in stage.parameters())
