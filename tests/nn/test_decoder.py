"""Slices against the whole sequence, and the whole sequence against a plain second decoder."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from terashard.nn.build import build_stage
from terashard.nn.decoder import DecoderStage
from terashard.nn.init import initialise_
from terashard.nn.loss import CrossEntropy
from terashard.spec.model import ModelSpec
from tests.nn.witness import (
    GPT2,
    LLAMA,
    largest_error,
    plain_logits,
    recompute_in_slices,
    run_in_slices,
)

LENGTH = 13
SLICES = {
    "one": [13],
    "equal": [4, 4, 5],
    "unequal": [7, 2, 4],
    "one-token": [1] * 13,
    "long-then-one-token": [11, 1, 1],
}
SPECS = {
    "llama": LLAMA,
    "llama-tied": replace(LLAMA, tied=True),
    "llama-all-heads": replace(LLAMA, num_kv_heads=6),
    "gpt2": GPT2,
    "gpt2-tied": replace(GPT2, tied=True),
}


def make(spec: ModelSpec, cuts: Sequence[int]) -> list[DecoderStage]:
    """Stages cut at ``cuts``, in float64, with weights large enough for all gradients to count."""
    ends = [0, *cuts, spec.num_layers]
    stages = []
    for k in range(len(ends) - 1):
        layers = range(ends[k], ends[k + 1])
        stage = build_stage(spec, layers, first=k == 0, last=k == len(ends) - 2)
        initialise_(stage, spec, seed=3, dtype=torch.float64)
        with torch.no_grad():
            for name, parameter in stage.named_parameters():
                if not name.endswith("bias"):
                    parameter.mul_(8 if "norm" not in name else 1)
        stages.append(stage)
    return stages


def batch(spec: ModelSpec) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(spec.vocab_size, (2, LENGTH + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def gradients(stages: Sequence[DecoderStage]) -> dict[str, Tensor]:
    """By global name; the copy of a tied weight is added to the weight it copies."""
    result: dict[str, Tensor] = {}
    for stage in stages:
        ties = stage.ties()
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None, name
            owner = ties.get(name, name)
            result[owner] = result[owner] + parameter.grad if owner in result else parameter.grad
    return result


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_an_uncut_stage_matches_a_plain_decoder(spec: ModelSpec) -> None:
    (stage,) = make(spec, [])
    tokens, targets = batch(spec)
    parameters = {n: p.detach().clone().requires_grad_() for n, p in stage.named_parameters()}
    expected = plain_logits(spec, parameters, tokens)
    logits = stage(tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-11, atol=1e-11)
    loss = CrossEntropy()
    loss(expected, targets).backward()
    loss(logits, targets).backward()
    assert largest_error(gradients([stage]), {n: p.grad for n, p in parameters.items()}) < 1e-10


@pytest.mark.parametrize("lengths", SLICES.values(), ids=SLICES.keys())
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_sliced_gradients_match_the_uncut_stage(spec: ModelSpec, lengths: list[int]) -> None:
    tokens, targets = batch(spec)
    loss = CrossEntropy(chunk_tokens=3, label_smoothing=0.1, z_loss=0.01)
    (whole,) = make(spec, [])
    expected = loss(whole(tokens), targets)
    expected.backward()
    for cuts in ([], [2]):
        stages = make(spec, cuts)
        value = run_in_slices(stages, tokens, targets, lengths, loss)
        torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=0)
        assert largest_error(gradients(stages), gradients([whole])) < 1e-10


@pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_recomputed_slices_give_the_same_gradients(spec: ModelSpec) -> None:
    tokens, _ = batch(spec)
    layers = range(spec.num_layers)
    whole, cut = (build_stage(spec, layers, first=True, last=False) for _ in range(2))
    for stage in (whole, cut):
        initialise_(stage, spec, seed=3, dtype=torch.float64)
    output = whole(tokens)
    cotangent = torch.randn(
        output.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    output.backward(cotangent)
    recompute_in_slices(cut, tokens, cotangent, [5, 1, 7])
    assert largest_error(gradients([cut]), gradients([whole])) < 1e-10


def test_bfloat16_slices_stay_close_to_float32() -> None:
    tokens, targets = batch(LLAMA)
    values = {}
    for dtype in (torch.float32, torch.bfloat16):
        stage = build_stage(LLAMA, range(3), first=True, last=True)
        initialise_(stage, LLAMA, seed=3, dtype=dtype)
        values[dtype] = float(run_in_slices([stage], tokens, targets, [6, 7], CrossEntropy()))
        assert all(p.grad is not None and p.grad.dtype == dtype for p in stage.parameters())
    assert values[torch.bfloat16] == pytest.approx(values[torch.float32], rel=1e-3)


def test_a_second_sequence_does_not_see_the_first() -> None:
    (stage,) = make(LLAMA, [])
    tokens, targets = batch(LLAMA)
    alone = run_in_slices([stage], tokens[1:], targets[1:], [6, 7], CrossEntropy())
    first = run_in_slices([stage], tokens[:1], targets[:1], [6, 7], CrossEntropy())
    both = run_in_slices([stage], tokens, targets, [6, 7], CrossEntropy())
    torch.testing.assert_close(alone + first, both, rtol=1e-12, atol=0)


def test_a_meta_stage_runs_without_storage() -> None:
    stage = build_stage(LLAMA, range(3), first=True, last=True)
    logits = stage(torch.zeros(2, 5, dtype=torch.long, device="meta"))
    assert logits.shape == (2, 5, LLAMA.vocab_size)
    assert logits.device.type == "meta"
