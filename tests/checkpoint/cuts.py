"""Tensors, and ways to cut them over ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from terashard.checkpoint.save import Piece, save
from terashard.comm.alone import AloneGroup
from terashard.comm.rows import row_range
from terashard.comm.threads import ThreadWorld, run_threads

torch.set_num_threads(1)


@dataclass(frozen=True)
class Part:
    """Rows ``[start, stop)`` of tensor ``name`` belong to ``rank``."""

    name: str
    rank: int
    start: int
    stop: int


def sample(seed: int = 0) -> dict[str, Tensor]:
    """One tensor of each kind that a training state has, and odd ones."""
    random = torch.Generator().manual_seed(seed)
    return {
        "model/layers.0.mlp.up.weight": torch.randn(7, 3, generator=random, dtype=torch.float64),
        "model/layers.0.norm.weight": torch.randn(5, generator=random).bfloat16(),
        "optimizer/exp_avg/layers.0.mlp.up.weight": torch.randn(7, 3, generator=random),
        "optimizer/step": torch.tensor(float(seed)),
        "data/order": torch.randint(-(2**62), 2**62, (9, 1, 2), generator=random),
        "mask": torch.tensor([True, False, True]),
        "no rows": torch.zeros(0, 4),
        "no columns": torch.zeros(4, 0, dtype=torch.int32),
        '__metadata__ "ü"/\n@0': torch.tensor([seed], dtype=torch.uint8),
    }


def evenly(tensors: Mapping[str, Tensor], members: int) -> list[Part]:
    """Dim 0 in equal chunks, as shards are cut; a 0-dim tensor belongs to the last rank."""
    parts = []
    for name, tensor in tensors.items():
        for rank in range(members):
            start, stop = row_range(tensor.shape[0], members, rank) if tensor.ndim else (0, 1)
            if tensor.ndim or rank == members - 1:
                parts.append(Part(name, rank, start, stop))
    return parts


def pieces_of(tensors: Mapping[str, Tensor], parts: Sequence[Part], rank: int) -> list[Piece]:
    """What ``rank`` passes to ``save``."""
    return [
        Piece(
            name=part.name,
            rows=whole[part.start : part.stop] if whole.ndim else whole,
            shape=tuple(whole.shape),
            first_row=part.start,
        )
        for part in parts
        if part.rank == rank
        for whole in (tensors[part.name],)
    ]


def save_on(
    root: Path, members: int, tensors: Mapping[str, Tensor], parts: Sequence[Part] | None = None
) -> Path:
    """Save step 1 of ``tensors`` from ``members`` threads."""
    cut = evenly(tensors, members) if parts is None else parts

    def rank_saves(world: ThreadWorld, rank: int) -> Path:
        group = world.group(rank, range(members), "all")
        own = pieces_of(tensors, cut, rank)
        return save(root, 1, own, {"members": members}, group=group, keep=2)

    paths = run_threads(members, rank_saves)
    assert len(set(paths)) == 1
    return paths[0]


def save_alone(root: Path, step: int, keep: int = 2) -> Path:
    """Save ``sample(step)`` from one rank."""
    tensors = sample(step)
    own = pieces_of(tensors, evenly(tensors, 1), 0)
    return save(root, step, own, {"step": step}, group=AloneGroup(0), keep=keep)


def same(one: Tensor, other: Tensor) -> bool:
    """Equal in element type, shape and every bit."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and one.reshape(-1).view(torch.uint8).equal(other.reshape(-1).view(torch.uint8))
    )
