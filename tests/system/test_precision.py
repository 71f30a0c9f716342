"""bfloat16 computes, float32 keeps: losses stay close, and no sum is taken in bfloat16.

And what no precision may change: nothing of the size of the logits outlives a chunk of tokens.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from terashard.comm.mesh import Mesh
from terashard.nn.carry import KeyValueCarry
from terashard.nn.init import Initialiser
from terashard.nn.loss import CrossEntropy
from terashard.plan.plan import Plan, spread_layers
from terashard.runtime.pipeline import Pipeline
from terashard.schedule.actions import MicroBatch
from terashard.shard.precision import Precision
from terashard.spec.model import ModelSpec
from tests.helpers.models import decoder_stages
from tests.helpers.threads import run_mesh

BF16 = Precision(compute=torch.bfloat16, master=torch.float32)
STEPS, SEQUENCES, TOKENS, VOCABULARY = 200, 8, 32, 124
WIDTH = 48
WORDS = (b"the ", b"slice ", b"of ", b"a ", b"token ", b"stage ", b"runs ", b"and ", b"waits. ")


def text(sequences: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random words one after the other, as bytes of ASCII: something a model can learn."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(sequences):
        drawn = torch.randint(0, len(WORDS), (TOKENS + 1,), generator=generator).tolist()
        rows.append(list(b"".join(WORDS[i] for i in drawn))[: TOKENS + 1])
    ids = torch.tensor(rows)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _pipeline(mesh: Mesh, precision: Precision, loss: Any = None) -> Pipeline:
    """Two layers, tied, on any mesh; two slices."""
    stages, shards = mesh.stages, mesh.shards
    spec = ModelSpec(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        mlp_size=96,
        max_length=TOKENS,
        tied=True,
    )
    plan = Plan(
        stages=stages,
        shards=shards,
        partition=(MicroBatch(SEQUENCES // shards, (16, 16)),),
        layers=spread_layers(2, stages),
    )
    fill = Initialiser(spec, 0)
    build = decoder_stages(spec, plan)
    return Pipeline(build, plan, mesh, loss=loss, precision=precision, fill=fill)


def _train(mesh: Mesh, precision: Precision) -> list[float]:
    pipeline = _pipeline(mesh, precision)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3, fused=True)
    losses = []
    for step in range(STEPS):
        result = pipeline.step(*text(SEQUENCES, seed=step))
        pipeline.scale_gradients(min(1.0, 1.0 / result.gradient_norm))
        optimizer.step()
        losses.append(result.loss)
    return losses


def test_two_hundred_steps_in_bfloat16_stay_within_one_percent_of_float32() -> None:
    (wanted,) = run_mesh(lambda mesh: _train(mesh, Precision()))
    found = run_mesh(lambda mesh: _train(mesh, BF16), stages=2)[0]
    assert wanted[-1] < 0.15 * wanted[0]
    assert found != wanted
    for step in range(0, STEPS, 10):
        here, there = sum(found[step : step + 10]), sum(wanted[step : step + 10])
        assert here == pytest.approx(there, rel=0.01), f"steps {step} to {step + 9}"


def _note_carries(monkeypatch: pytest.MonkeyPatch) -> set[torch.dtype]:
    """The types in which carries sum what later slices owe, filled while steps run."""
    types: set[torch.dtype] = set()
    owe = KeyValueCarry.owe

    def noting(carry: KeyValueCarry, key: Tensor, value: Tensor) -> None:
        owe(carry, key, value)
        assert carry._owed is not None
        types.update(owed.dtype for owed in carry._owed)

    monkeypatch.setattr(KeyValueCarry, "owe", noting)
    return types


def test_under_bfloat16_everything_that_is_kept_or_summed_is_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    carries, losses = _note_carries(monkeypatch), set()

    class Loss(CrossEntropy):
        def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
            total = super().__call__(logits, targets)
            losses.add((logits.dtype, total.dtype))
            return total

    def rank(mesh: Mesh) -> None:
        pipeline = _pipeline(mesh, BF16, Loss())
        pipeline.step(*text(SEQUENCES // 2, seed=mesh.data.rank))
        for unit in pipeline.units:
            assert {p.full.dtype for p in unit.parameters} == {torch.bfloat16}
            assert {p.local.dtype for p in unit.parameters} == {torch.float32}
            assert unit.gradients is not None
            kept = [*unit.gradients.full, *unit.gradients.rows]
            assert {tensor.dtype for tensor in kept} == {torch.float32}
        for parameter in pipeline.parameters():
            assert parameter.dtype == torch.float32
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32

    run_mesh(rank, stages=2, shards=2)
    assert carries == {torch.float32}
    assert losses == {(torch.bfloat16, torch.float32)}


def _is_logits(tensor: Tensor) -> bool:
    return tensor.dim() > 1 and tensor.shape[-1] == VOCABULARY and tensor.shape[-2] != WIDTH


class LogitsWatch(TorchDispatchMode):
    """Knows every living storage of a tensor of logits: one row of the vocabulary per token.

    The head's weight, seen transposed, has such rows too, one per channel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor) and _is_logits(tensor):
                storage = tensor.untyped_storage()
                self.seen[StorageWeakRef(storage)] = storage.nbytes()
        return made

    def bytes_alive(self) -> int:
        return sum(size for storage, size in self.seen.items() if not storage.expired())


@pytest.mark.parametrize("precision", [Precision(), BF16], ids=["float32", "bfloat16"])
def test_no_logits_outlive_a_chunk_of_tokens_in_a_whole_step(precision: Precision) -> None:
    watch, alive = LogitsWatch(), []

    class Loss(CrossEntropy):
        def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
            alive.append(watch.bytes_alive())
            return super().__call__(logits, targets)

    def rank(mesh: Mesh) -> None:
        pipeline = _pipeline(mesh, precision, Loss(chunk_tokens=8))
        with watch:
            pipeline.step(*text(SEQUENCES, seed=0))
            assert watch.bytes_alive() == 0
            pipeline.evaluate(*text(SEQUENCES, seed=0))
        assert watch.bytes_alive() == 0

    run_mesh(rank)
    chunk = 8 * VOCABULARY * precision.compute.itemsize
    assert len(alive) == 2 * SEQUENCES * TOKENS // 8
    assert set(alive) == {chunk}, "when a chunk's loss begins, its own logits are all there is"
    assert max(watch.seen.values()) <= 8 * VOCABULARY * 4
