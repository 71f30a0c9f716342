r"""Which tokens a step sees: a function of (seed, global sample index), and of nothing else.

The tokens ``[first, last)`` of a folder are cut into windows of ``N`` inputs, each with its ``N``
targets one token further: window ``w`` reads ``[first + wN, first + wN + N]``, so neighbours share
one token, as target and as input, and every target is learned once per epoch. Samples are numbered
through all epochs: sample ``i`` is position ``i mod n`` of epoch ``⌊i/n⌋``, ``n`` the number of
windows. Each epoch has its own permutation, computed without state; so any number of ranks, stopped
and resumed at any sample, draws the same sequence. Windows run across document boundaries.

Shapes: N tokens of a sequence, B sequences of this rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terashard.data.permutation import Permutation
from terashard.data.tokens import TokenFolder
from terashard.errors import DataError


class Batch(NamedTuple):
    """Inputs and targets of one data-parallel rank."""

    tokens: Tensor
    """[B, N] int64."""
    targets: Tensor
    """[B, N] int64: the token after each of ``tokens``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceSource:
    """Sequences of ``length`` tokens out of a folder's tokens ``[first, last)``, epoch by epoch."""

    folder: TokenFolder
    length: int
    """N."""
    seed: int = 0
    shuffle: bool = True
    """Whether every epoch has a random order of its own; otherwise the order of the file."""
    first: int = 0
    """First token that may be read."""
    last: int | None = None
    """Token before which reading ends; by default all are read."""

    def __post_init__(self) -> None:
        """Refuse a range outside the folder and sequences longer than the range."""
        if not 0 <= self.first <= self.stop <= self.folder.info.tokens:
            raise DataError(
                f"tokens {self.first} to {self.stop} were asked for, but {self.folder.path} holds"
                f" {self.folder.info.tokens}; ask for a part of them"
            )
        available = self.stop - self.first
        if self.length < 1 or available <= self.length:
            raise DataError(
                f"a sequence of {self.length} tokens needs {self.length + 1} with its last target,"
                f" but there are {available} tokens to draw from in {self.folder.path}; choose"
                f" batch.tokens from 1 to {max(available - 1, 1)}, or prepare more text"
            )

    @property
    def stop(self) -> int:
        """Token before which reading ends."""
        return self.folder.info.tokens if self.last is None else self.last

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        return (self.stop - self.first - 1) // self.length

    def start_of(self, sample: int) -> int:
        """Position in the folder of the first token of global sample ``sample``."""
        epoch, position = divmod(sample, self.num_samples)
        if self.shuffle:
            position = Permutation.of_epoch(self.num_samples, self.seed, epoch)(position)
        return self.first + position * self.length

    def window(self, sample: int) -> NDArray[np.unsignedinteger]:
        """The N+1 tokens of global sample ``sample``, as a view of the file."""
        start = self.start_of(sample)
        return self.folder.tokens[start : start + self.length + 1]


@dataclass(frozen=True, slots=True)
class Cursor:
    """How many samples a run has drawn, over all data-parallel ranks: where a resume goes on."""

    sample: int = 0

    def __post_init__(self) -> None:
        """Refuse a position before the first sample."""
        if type(self.sample) is not int or self.sample < 0:
            raise DataError(f"the data cursor is {self.sample!r}; it must be an integer from 0 on")

    def advance(self, sequences: int) -> Self:
        """The cursor after one more global batch."""
        return type(self)(self.sample + sequences)

    def epoch(self, source: SequenceSource) -> int:
        """Which pass over ``source`` the next sample belongs to, from 0."""
        return self.sample // source.num_samples

    def to_json(self) -> dict[str, int]:
        """What a checkpoint stores."""
        return {"sample": self.sample}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Read back what ``to_json`` gave."""
        return cls(record.get("sample", None))


def batch(source: SequenceSource, first_sample: int, sequences: int, rows: range) -> Batch:
    """Rows ``rows`` of the global batch of ``sequences`` samples from ``first_sample`` on."""
    if rows.step != 1 or not 0 <= rows.start <= rows.stop <= sequences:
        raise DataError(
            f"rows {rows.start} to {rows.stop} were asked of a batch of {sequences} sequences;"
            " every rank takes a run of rows inside the batch"
        )
    tokens = np.empty((len(rows), source.length), dtype=np.int64)  # [B, N]
    targets = np.empty_like(tokens)
    for at, row in enumerate(rows):
        window = source.window(first_sample + row)  # [N+1]
        tokens[at], targets[at] = window[:-1], window[1:]
    _check_ids(source.folder, max(tokens.max(initial=0), targets.max(initial=0)))
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets))


def held_out(folder: TokenFolder, part: float) -> tuple[range, range]:
    """Token ranges (training, held out), disjoint: the last ``part`` of the tokens is held out.

    The cut moves to the nearest beginning of a document, unless that would hold out less than half
    of what was asked (then it stays inside a document).
    """
    if not 0.0 <= part < 1.0:
        raise DataError(f"data.held_out is {part}; it must lie in [0, 1)")
    total = folder.info.tokens
    asked = round(total * part)
    cut = _nearest(folder.documents, total - asked)
    if 2 * (total - cut) < asked or not cut:
        cut = total - asked
    return range(cut), range(cut, total)


def _check_ids(folder: TokenFolder, largest: int) -> None:
    if largest >= folder.vocab_size:
        raise DataError(
            f"{folder.path} holds token id {largest}, outside its vocabulary 0 to"
            f" {folder.vocab_size - 1}; the folder is damaged: prepare the data again"
        )


def _nearest(offsets: NDArray[np.int64], position: int) -> int:
    after = int(np.searchsorted(offsets, position))
    before, behind = int(offsets[max(after - 1, 0)]), int(offsets[after])
    return before if position - before < behind - position else behind
