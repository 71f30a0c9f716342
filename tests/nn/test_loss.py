"""Cross-entropy in chunks: against autograd's own, and without logits that outlive a chunk."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from terashard.errors import ConfigError, DataError
from terashard.nn.loss import CrossEntropy, loss_and_gradient, loss_only

WORDS, WIDTH = 23, 8
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ignored": {"ignore_index": 5},
    "smoothed": {"label_smoothing": 0.2},
    "z": {"z_loss": 0.3},
    "capped": {"soft_cap": 1.5},
    "all": {"ignore_index": 5, "label_smoothing": 0.2, "z_loss": 0.3, "soft_cap": 1.5},
}


def witness(how: CrossEntropy, logits: Tensor, targets: Tensor) -> Tensor:
    """The same sum through autograd, uncut."""
    if how.soft_cap is not None:
        logits = how.soft_cap * torch.tanh(logits / how.soft_cap)
    rows, labels = logits.flatten(0, -2), targets.flatten()
    value = F.cross_entropy(
        rows,
        labels,
        reduction="sum",
        ignore_index=how.ignore_index,
        label_smoothing=how.label_smoothing,
    )
    kept = labels != how.ignore_index
    return value + how.z_loss * rows.logsumexp(-1)[kept].square().sum()


def drawn() -> tuple[nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(WIDTH, WORDS, bias=False, dtype=torch.float64)
    with torch.no_grad():
        head.weight.normal_(generator=generator)
    hidden = torch.randn(3, 7, WIDTH, generator=generator, dtype=torch.float64)
    return head, hidden, torch.randint(WORDS, (3, 7), generator=generator)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_loss_and_gradient_match_autograd(options: dict[str, Any]) -> None:
    how = CrossEntropy(**options)
    head, hidden, targets = drawn()
    logits = head(hidden).detach().requires_grad_()
    twin = logits.detach().clone().requires_grad_()
    targets[0, 0] = how.ignore_index
    value, expected = how(logits, targets), witness(how, twin, targets)
    assert value.ndim == 0
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=0)
    (2.5 * value).backward()
    (2.5 * expected).backward()
    torch.testing.assert_close(logits.grad, twin.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 21, 1000])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_chunks_change_nothing(options: dict[str, Any], chunk_tokens: int) -> None:
    how = CrossEntropy(chunk_tokens=chunk_tokens, **options)
    head, hidden, targets = drawn()
    leaf = hidden.clone().requires_grad_()
    expected = witness(how, head(leaf), targets)
    d_hidden, d_weight = torch.autograd.grad(expected, (leaf, head.weight))
    value, gradient = loss_and_gradient(head, hidden, targets, how)
    assert not value.requires_grad
    torch.testing.assert_close(value, expected.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(gradient, d_hidden, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(head.weight.grad, d_weight, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss_only(head, hidden, targets, how), value, rtol=1e-13, atol=0)


def test_evaluation_leaves_no_gradient() -> None:
    head, hidden, targets = drawn()
    value = loss_only(head, hidden.requires_grad_(), targets, CrossEntropy(chunk_tokens=4))
    assert not value.requires_grad
    assert head.weight.grad is None
    assert hidden.grad is None


class LargeStorages(TorchDispatchMode):
    """The most bytes alive at one time in storages of at least ``threshold`` bytes."""

    def __init__(self, threshold: int) -> None:
        super().__init__()
        self.threshold, self.peak = threshold, 0
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor) and x.untyped_storage().nbytes() >= self.threshold:
                storage = x.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {k: v for k, v in self.alive.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(n for _, n in self.alive.values()))
        return result


@pytest.mark.parametrize(("options", "buffers"), [({}, 2), ({"soft_cap": 30.0, "z_loss": 0.1}, 3)])
def test_no_logits_outlive_a_chunk(options: dict[str, Any], buffers: int) -> None:
    tokens, words, chunk = 64, 4096, 8
    head = nn.Linear(4, words, bias=False)
    hidden, targets = torch.zeros(2, tokens // 2, 4), torch.zeros(2, tokens // 2, dtype=torch.long)
    chunk_bytes = chunk * words * 4
    with LargeStorages(chunk_bytes) as seen:
        loss_and_gradient(head, hidden, targets, CrossEntropy(chunk_tokens=chunk, **options))
    assert seen.peak == buffers * chunk_bytes  # the logits, and the loss's own buffers
    with LargeStorages(chunk_bytes) as uncut:
        loss_and_gradient(head, hidden, targets, CrossEntropy(chunk_tokens=tokens, **options))
    assert uncut.peak == seen.peak * tokens // chunk


def test_a_loss_of_ones_own_is_called_once_with_the_whole_slice() -> None:
    head, hidden, targets = drawn()
    shapes = []

    def squared(output: Tensor, labels: Tensor) -> Tensor:
        shapes.append((tuple(output.shape), tuple(labels.shape)))
        return output.square().sum() + labels.sum()

    value, gradient = loss_and_gradient(None, hidden, targets, squared)
    torch.testing.assert_close(value, hidden.square().sum() + targets.sum())
    torch.testing.assert_close(gradient, 2 * hidden)
    loss_and_gradient(head, hidden, targets, squared)
    assert shapes == [((3, 7, WIDTH), (3, 7)), ((3, 7, WORDS), (3, 7))]


def test_bfloat16_logits_give_a_float32_sum() -> None:
    head, hidden, targets = drawn()
    logits = head(hidden).to(torch.bfloat16)
    value = CrossEntropy()(logits, targets)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), witness(CrossEntropy(), logits.double(), targets))


@pytest.mark.parametrize("wrong", [WORDS, -1])
def test_a_target_outside_the_vocabulary_is_refused(wrong: int) -> None:
    head, hidden, targets = drawn()
    targets[1, 2] = wrong
    with pytest.raises(DataError, match=f"token id {wrong} is outside the vocabulary of {WORDS}"):
        loss_and_gradient(head, hidden, targets, CrossEntropy())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_tokens": 0}, "loss.chunk_tokens is 0; it must be at least 1"),
        ({"label_smoothing": 3.0}, r"loss.label_smoothing is 3.0; it must lie in \[0, 1\)"),
        ({"z_loss": -1.0}, "loss.z_loss is -1.0; it must be at least 0"),
        ({"soft_cap": 0.0}, "loss.soft_cap is 0.0; it must be above 0, or none"),
    ],
    ids=str,
)
def test_a_loss_that_cannot_be_is_refused_at_birth(options: dict[str, Any], message: str) -> None:
    """Regression: only the configuration looked at the ranges."""
    with pytest.raises(ConfigError, match=message):
        CrossEntropy(**options)
