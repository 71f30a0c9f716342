"""Parameters that are frozen and thawed at awkward moments."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.shard.engines import (
    Here,
    Net,
    gradients,
    loss_of,
    mean_gradients,
    run,
    same,
    seeded,
    shard,
    words,
)

POOLS = ["static", "any", "off"]


def exact(step: int) -> dict[str, Tensor | None]:
    return mean_gradients(
        seeded(Net()), [lambda m, r=r: loss_of(m, words(r, step)) for r in (0, 1)]
    )


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("waits", ["no sync", "partial sums"])
@pytest.mark.parametrize("which", ["head.weight", "blocks.1"])
def test_what_waits_for_a_parameter_that_is_frozen_then_is_in_the_next_sum(
    which: str, waits: str, pool: str
) -> None:
    """It was withheld, and turned up in the gradient of a much later step."""

    def program(here: Here) -> Any:
        model = shard(here.model, *((2,) if waits == "no sync" else (2, 1)), pool=pool)
        sums = (
            model.set_requires_gradient_sync
            if waits == "no sync"
            else model.set_requires_all_reduce
        )
        chosen = [p for name, p in model.named_parameters() if name.startswith(which)]

        def train(wants: bool) -> None:
            for parameter in model.parameters():
                if any(parameter is one for one in chosen):
                    parameter.requires_grad_(wants)

        sums(False)
        loss_of(model, words(here.rank, 0)).backward()
        train(False)
        sums(True)
        loss_of(model, words(here.rank, 1)).backward()
        first = gradients(model)
        for step in (2, 3):
            model.zero_grad()
            loss_of(model, words(here.rank, step)).backward()
        model.zero_grad()
        train(True)
        loss_of(model, words(here.rank, 4)).backward()
        return first, gradients(model)

    for first, last in run("ours", program, 2, lambda: seeded(Net())):
        same(last, exact(4))
        for name, gradient in first.items():
            both = exact(0)[name] + (0 if name.startswith(which) else exact(1)[name])
            same(gradient, both)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("how", ["thaw", "freeze"])
def test_what_is_said_to_parameters_that_stand_full_holds(how: str, pool: str) -> None:
    """The root's stand full after forward."""

    def program(here: Here) -> Any:
        model = shard(here.model, 2, pool=pool)
        loss_of(model, words(here.rank, 0)).backward()
        model.zero_grad()
        if how == "thaw":
            model.requires_grad_(False)
            model(words(here.rank, 1))
            model.requires_grad_(True)
        else:
            model(words(here.rank, 1))
            model.embed.weight.requires_grad_(False)
        loss_of(model, words(here.rank, 2)).backward()
        wants = {name: p.requires_grad for name, p in model.named_parameters()}
        return gradients(model), wants

    for found, wants in run("ours", program, 2, lambda: seeded(Net())):
        for name, gradient in exact(2).items():
            frozen = how == "freeze" and name == "embed.weight"
            assert wants[name] is not frozen
            same(found[name], None if frozen else gradient)


def test_sparse_gradients_of_a_frozen_embedding_are_none() -> None:
    def program(here: Here) -> Any:
        model = shard(here.model, 2)
        model.embed.weight.requires_grad_(False)
        loss_of(model, words(here.rank, 0)).backward()
        return model.embed.weight.grad

    def build() -> Any:
        net = Net()
        net.embed.sparse = True
        return seeded(net)

    assert run("ours", program, 2, build) == [None, None]
    assert torch.is_grad_enabled()
