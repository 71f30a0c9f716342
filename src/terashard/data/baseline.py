r"""What a table of counts achieves: the yardstick for a small model.

With counts ``c`` over the training tokens and V the vocabulary, add-one smoothing gives

.. math:: p(b) = \frac{c(b) + 1}{\sum c + V}, \qquad p(b|a) = \frac{c(ab) + 1}{c(a\,\cdot) + V},

and the loss of a text is the mean of ``-ln p`` over its tokens but the first of each sequence: the
same targets that a model is asked for. On the Python standard library, byte by byte, unigrams reach
about 3.2 and bigrams about 2.5 nats.

Shapes: V vocabulary, N tokens of a sequence.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from terashard.errors import DataError

LARGEST_VOCABULARY = 8192
"""A bigram table has V² entries: half a gigabyte here."""
_CHUNK = 1 << 22

Tokens = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Mean loss, in nats per token."""

    unigram: float
    bigram: float


@dataclass(frozen=True, slots=True, eq=False)
class CountTables:
    """Smoothed negative log-probabilities, in nats."""

    unigram: NDArray[np.float64]
    """[V]: -ln p(b)."""
    bigram: NDArray[np.float64]
    """[V, V]: -ln p(b | a) at [a, b]."""

    @classmethod
    def count(cls, tokens: Tokens, vocab_size: int) -> Self:
        """Count ``tokens`` [T] (training tokens, memory-mapped or not)."""
        if vocab_size > LARGEST_VOCABULARY:
            raise DataError(
                f"a bigram table over a vocabulary of {vocab_size} is too large;"
                f" the largest is {LARGEST_VOCABULARY}"
            )
        singles = np.zeros(vocab_size, dtype=np.int64)
        pairs = np.zeros(vocab_size**2, dtype=np.int64)
        for start in range(0, len(tokens), _CHUNK):
            chunk = tokens[start : start + _CHUNK + 1].astype(np.int64)
            _check(chunk, vocab_size)
            singles += np.bincount(chunk[:_CHUNK], minlength=vocab_size)
            pairs += np.bincount(chunk[:-1] * vocab_size + chunk[1:], minlength=vocab_size**2)
        return cls(_surprise(singles), _surprise(pairs.reshape(vocab_size, vocab_size)))

    def losses(self, tokens: Tokens) -> Baseline:
        """Mean losses on ``tokens`` [..., N+1]: one long text, or windows of a length."""
        unigram = bigram = 0.0
        rows = tokens.reshape(-1, tokens.shape[-1])
        targets = rows.shape[0] * (rows.shape[1] - 1)
        if targets < 1:
            raise DataError(
                f"held-out tokens of shape {tokens.shape} hold no target; give at least two tokens"
            )
        for row in rows:
            for start in range(0, len(row) - 1, _CHUNK):
                chunk = row[start : start + _CHUNK + 1]
                _check(chunk, len(self.unigram))
                unigram += float(self.unigram[chunk[1:]].sum())
                bigram += float(self.bigram[chunk[:-1], chunk[1:]].sum())
        return Baseline(unigram=unigram / targets, bigram=bigram / targets)


def baseline(train: Tokens, held_out: Tokens, vocab_size: int) -> Baseline:
    """Losses on ``held_out`` [..., N+1] of the tables counted on ``train`` [T]."""
    return CountTables.count(train, vocab_size).losses(held_out)


def _surprise(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Counts [..., V] → -ln of the add-one estimate along the last dim."""
    total = counts.sum(axis=-1, keepdims=True) + counts.shape[-1]
    surprise: NDArray[np.float64] = np.log(total) - np.log(counts + 1)
    return surprise


def _check(tokens: Tokens, vocab_size: int) -> None:
    if tokens.max() >= vocab_size:
        raise DataError(
            f"token id {tokens.max()} lies outside the vocabulary 0 to {vocab_size - 1};"
            " give the vocabulary size that the tokens were made with"
        )
