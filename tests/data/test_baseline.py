from collections import Counter
from itertools import pairwise
from math import log
from pathlib import Path

import numpy as np
import pytest

from terashard.data.baseline import CountTables, baseline
from terashard.data.batches import held_out
from terashard.data.corpus import standard_library_sources
from terashard.data.tokens import TokenFolder, prepare
from terashard.errors import DataError

V = 7


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    weights = np.arange(1, V + 1) / np.arange(1, V + 1).sum()
    return np.random.default_rng(seed).choice(V, shape, p=weights).astype(np.uint16)


def by_hand(train: np.ndarray, windows: np.ndarray) -> tuple[float, float]:
    singles, pairs = Counter(train.tolist()), Counter(pairwise(train.tolist()))
    firsts = Counter(train[:-1].tolist())
    unigram = bigram = count = 0.0
    for window in windows.tolist():
        for a, b in pairwise(window):
            unigram -= log((singles[b] + 1) / (len(train) + V))
            bigram -= log((pairs[a, b] + 1) / (firsts[a] + V))
            count += 1
    return unigram / count, bigram / count


def test_losses_are_those_of_tables_counted_by_hand() -> None:
    train, windows = draw(500), draw(4, 21, seed=1)
    found = baseline(train, windows, V)
    assert (found.unigram, found.bigram) == pytest.approx(by_hand(train, windows), rel=1e-12)
    found = baseline(train, windows[0], V)
    assert (found.unigram, found.bigram) == pytest.approx(by_hand(train, windows[:1]), rel=1e-12)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    train, windows = draw(500), draw(3, 64, seed=1)
    whole = baseline(train, windows, V)
    for chunk in (1, 5, 63, 64, 499, 500):
        monkeypatch.setattr("terashard.data.baseline._CHUNK", chunk)
        found = baseline(train, windows, V)
        assert (found.unigram, found.bigram) == pytest.approx(
            (whole.unigram, whole.bigram), rel=1e-12
        )


def test_probabilities_sum_to_one_for_unseen_tokens_too() -> None:
    tables = CountTables.count(np.array([1, 2, 1], dtype=np.uint8), V)
    np.testing.assert_allclose(np.exp(-tables.unigram).sum(), 1.0, rtol=1e-14)
    np.testing.assert_allclose(np.exp(-tables.bigram).sum(axis=1), np.ones(V), rtol=1e-14)


def test_tokens_outside_the_vocabulary_and_huge_vocabularies_are_refused() -> None:
    with pytest.raises(DataError, match="token id 9 lies outside the vocabulary 0 to 6"):
        CountTables.count(np.array([1, 9]), V)
    with pytest.raises(DataError, match="token id 9 lies outside the vocabulary 0 to 6"):
        CountTables.count(draw(5), V).losses(np.array([1, 9]))
    with pytest.raises(DataError, match="a vocabulary of 50257 is too large; the largest is 8192"):
        CountTables.count(draw(5), 50257)
    with pytest.raises(DataError, match="hold no target; give at least two tokens"):
        CountTables.count(draw(5), V).losses(np.array([1]))


def test_the_standard_library_has_the_known_entropies(tmp_path: Path) -> None:
    prepare(standard_library_sources(), tmp_path / "tokens")
    folder = TokenFolder.open(tmp_path / "tokens")
    train, held = held_out(folder, 0.05)
    found = baseline(folder.tokens[: train.stop], folder.tokens[held.start :], 256)
    assert found.bigram == pytest.approx(2.47, abs=0.08)
    assert found.unigram == pytest.approx(3.21, abs=0.12)
