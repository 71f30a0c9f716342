from pathlib import Path

import numpy as np
import pytest
import torch

from terashard.comm.rows import row_range
from terashard.data.batches import Cursor, SequenceSource, batch, held_out
from terashard.errors import DataError
from tests.data.folders import counting_folder, text_folder


def starts(source: SequenceSource, samples: range) -> list[int]:
    return [int(source.window(sample)[0]) for sample in samples]


def test_targets_are_the_tokens_shifted_by_one(tmp_path: Path) -> None:
    source = SequenceSource(folder=counting_folder(tmp_path / "d", 101), length=10, shuffle=False)
    tokens, targets = batch(source, 2, 3, range(3))
    expected = torch.arange(20, 50).reshape(3, 10)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens, expected)
    assert torch.equal(targets, expected + 1)


@pytest.mark.parametrize(("tokens", "samples"), [(11, 1), (20, 1), (21, 2), (101, 10), (110, 10)])
def test_the_last_window_ends_with_its_last_target(
    tmp_path: Path, tokens: int, samples: int
) -> None:
    source = SequenceSource(folder=counting_folder(tmp_path / "d", tokens), length=10)
    assert source.num_samples == samples
    assert sorted(starts(source, range(samples))) == [10 * n for n in range(samples)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_shows_every_window_once(tmp_path: Path, shuffle: bool) -> None:
    folder = counting_folder(tmp_path / "d", 371)
    source = SequenceSource(folder=folder, length=10, seed=3, shuffle=shuffle)
    epochs = [starts(source, range(37 * epoch, 37 * (epoch + 1))) for epoch in range(4)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(0, 370, 10))
    assert len({tuple(epoch) for epoch in epochs}) == (4 if shuffle else 1)


def test_the_order_depends_on_the_seed_and_is_the_same_for_a_new_source(tmp_path: Path) -> None:
    folder = counting_folder(tmp_path / "d", 371)

    def drawn(seed: int) -> list[int]:
        return starts(SequenceSource(folder=folder, length=10, seed=seed), range(60))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_ranks_together_draw_the_global_batch(tmp_path: Path, ranks: int) -> None:
    source = SequenceSource(folder=counting_folder(tmp_path / "d", 371), length=10, seed=3)
    whole = batch(source, 30, 12, range(12))  # across the end of the epoch at sample 37
    parts = [batch(source, 30, 12, range(*row_range(12, ranks, rank))) for rank in range(ranks)]
    assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)


def test_a_resume_with_other_ranks_and_batches_goes_on_with_the_same_samples(
    tmp_path: Path,
) -> None:
    source = SequenceSource(folder=counting_folder(tmp_path / "d", 371), length=10, seed=3)

    def draw(cursor: Cursor, steps: int, sequences: int, ranks: int) -> tuple[list[int], Cursor]:
        seen: list[int] = []
        for _ in range(steps):
            for rank in range(ranks):
                rows = range(*row_range(sequences, ranks, rank))
                seen += batch(source, cursor.sample, sequences, rows).tokens[:, 0].tolist()
            cursor = cursor.advance(sequences)
        return seen, cursor

    uninterrupted, end = draw(Cursor(), 20, 6, 1)
    before, stopped = draw(Cursor(), 7, 6, 2)
    after, resumed = draw(Cursor.from_json(stopped.to_json()), 13, 6, 3)
    assert before + after == uninterrupted
    assert resumed == end == Cursor(120)
    assert [cursor.epoch(source) for cursor in (Cursor(36), Cursor(37), end)] == [0, 1, 3]


@pytest.mark.parametrize("record", [{}, {"sample": -1}, {"sample": 1.5}, {"sample": "3"}])
def test_a_broken_cursor_is_refused(record: dict[str, object]) -> None:
    with pytest.raises(DataError, match=r"the data cursor is .*; it must be an integer from 0 on"):
        Cursor.from_json(record)


def test_training_and_held_out_windows_share_no_token(tmp_path: Path) -> None:
    folder = counting_folder(tmp_path / "d", 1000)
    seen = []
    for part in held_out(folder, 0.3):
        source = SequenceSource(folder=folder, length=7, first=part.start, last=part.stop)
        windows = [source.window(sample) for sample in range(source.num_samples)]
        seen.append(set(np.concatenate(windows).tolist()))
    assert (max(seen[0]), min(seen[1])) == (693, 700)
    assert max(seen[1]) == 994


@pytest.mark.parametrize(
    ("documents", "part", "cut"),
    [
        ((), 0.1, 900),
        ((), 0.0, 1000),
        ((870, 940), 0.1, 870),  # the nearest beginning of a document
        ((860, 920), 0.1, 920),
        ((100, 200), 0.1, 900),  # nothing would be held out
        ((960,), 0.1, 900),  # less than half would be held out
        ((820,), 0.1, 820),
        ((), 0.95, 50),
        ((100, 200), 0.0, 1000),
        ((100,), 0.95, 100),
    ],
)
def test_the_held_out_part_begins_with_a_document_if_one_is_near(
    tmp_path: Path, documents: tuple[int, ...], part: float, cut: int
) -> None:
    folder = counting_folder(tmp_path / "d", 1000, documents=documents)
    assert held_out(folder, part) == (range(cut), range(cut, 1000))


def test_text_comes_back_out_of_a_batch(tmp_path: Path) -> None:
    folder = text_folder(tmp_path, ["Hello, ", "world."])
    source = SequenceSource(folder=folder, length=12)
    tokens, targets = batch(source, 0, 1, range(1))
    assert folder.decode(tokens[0].numpy()) == "Hello, world"
    assert folder.decode(targets[0].numpy()) == "ello, world."


def test_sequences_longer_than_the_data_are_refused_with_numbers(tmp_path: Path) -> None:
    folder = counting_folder(tmp_path / "d", 100)
    SequenceSource(folder=folder, length=99)
    message = r"a sequence of 100 tokens needs 101 .* there are 100 tokens .* from 1 to 99, or"
    with pytest.raises(DataError, match=message):
        SequenceSource(folder=folder, length=100)
    with pytest.raises(DataError, match=r"there are 10 tokens .* from 1 to 9, or prepare"):
        SequenceSource(folder=folder, length=10, first=90)
    with pytest.raises(DataError, match="a sequence of 0 tokens"):
        SequenceSource(folder=folder, length=0)


@pytest.mark.parametrize(("first", "last"), [(-1, 50), (50, 101), (60, 50)])
def test_a_range_outside_the_folder_is_refused(tmp_path: Path, first: int, last: int) -> None:
    folder = counting_folder(tmp_path / "d", 100)
    with pytest.raises(DataError, match=rf"tokens {first} to {last} were asked for, but .* 100;"):
        SequenceSource(folder=folder, length=5, first=first, last=last)


def test_a_token_outside_the_vocabulary_is_refused_with_numbers(tmp_path: Path) -> None:
    folder = counting_folder(tmp_path / "d", 100, vocab_size=50)
    source = SequenceSource(folder=folder, length=10, shuffle=False)
    batch(source, 0, 1, range(1))
    with pytest.raises(DataError, match=r"holds token id 50, outside its vocabulary 0 to 49; the"):
        batch(source, 4, 1, range(1))


@pytest.mark.parametrize("rows", [range(2, 5), range(0, 4, 2), range(-1, 2)])
def test_rows_outside_the_batch_are_refused(tmp_path: Path, rows: range) -> None:
    source = SequenceSource(folder=counting_folder(tmp_path / "d", 100), length=10)
    with pytest.raises(DataError, match="of a batch of 4 sequences"):
        batch(source, 0, 4, rows)
