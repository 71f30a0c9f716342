"""Gradients that wait for their sum lose no bits, however narrow the parameters compute."""

from typing import Any

import torch
from torch import nn

import terashard
from tests.helpers.torch_threads import run_ranks
from tests.shard.engines import mesh_of


def test_waiting_gradients_add_up_in_float32() -> None:
    """1 + 1/256 is 1 in bfloat16; thirty times 1/256 on top of 1 are lost there one by one."""

    def program(rank: int) -> float:
        model: Any = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        policy = terashard.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
        terashard.fully_shard(model, mesh=mesh_of(2), mp_policy=policy)
        for part in range(31):
            model.set_requires_gradient_sync(part == 30)
            x = torch.full((1, 2), 1.0 if part == 0 else 1 / 256)
            model(x).float().sum().backward()
        return float(model.weight.grad.to_local()[0, 0])

    for found in run_ranks(2, program):
        assert found == 1 + 30 / 256


def test_waiting_gradients_of_parameters_kept_in_bfloat16_do_too() -> None:
    def program(rank: int) -> float:
        model: Any = nn.Linear(2, 2, bias=False).bfloat16()
        with torch.no_grad():
            model.weight.zero_()
        terashard.fully_shard(model, mesh=mesh_of(2))
        for part in range(33):
            model.set_requires_gradient_sync(part == 32)
            x = torch.full((1, 2), 1.0 if part == 0 else 1 / 256, dtype=torch.bfloat16)
            model(x).sum().backward()
        return float(model.weight.grad.to_local()[0, 0])

    for found in run_ranks(2, program):
        assert found == 1 + 32 / 256
