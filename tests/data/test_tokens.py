import json
import resource
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from terashard.data.corpus import load_corpus, split_documents
from terashard.data.tokens import TokenFolder, TokenInfo, prepare
from terashard.errors import DataError
from tests.data.folders import text_folder, trained_tokenizer, word_tokenizer

TEXTS = ["Grüße, 世界", "one", "two\r\nlines"]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_bytes(text.encode())
    return folder


def test_bytes_are_stored_as_they_are_with_document_boundaries(sources: Path) -> None:
    info = prepare([sources], sources.parent / "out")
    folder = TokenFolder.open(sources.parent / "out")
    folder.verify()
    assert bytes(folder.tokens) == "".join(TEXTS).encode()
    spans = zip(folder.documents[:-1], folder.documents[1:], strict=True)
    assert [folder.decode(folder.tokens[a:b]) for a, b in spans] == TEXTS
    assert folder.info == info
    assert (folder.vocab_size, folder.tokens.dtype) == (256, np.uint8)
    assert info.bytes_per_token == 1.0


def test_tokens_json_says_what_is_there(sources: Path) -> None:
    (sources / "3.txt").write_bytes(b"\xff!")
    prepare([sources], sources.parent / "out")
    stored = (sources.parent / "out" / "tokens.bin").read_bytes()
    assert json.loads((sources.parent / "out" / "tokens.json").read_text()) == {
        "format": "terashard-tokens",
        "version": 1,
        "dtype": "uint8",
        "tokens": 32,
        "documents": 4,
        "vocab_size": 256,
        "tokenizer": "bytes",
        "separator": None,
        "text_bytes": 32,
        "replaced": 1,
        "checksum": blake2b(stored, digest_size=16).hexdigest(),
    }


def test_a_tokenizer_file_gives_the_ids_of_the_tokenizers_library(sources: Path) -> None:
    path = sources.parent / "tokenizer.json"
    witness = trained_tokenizer(path, TEXTS)
    info = prepare([sources], sources.parent / "out", tokenizer=path)
    folder = TokenFolder.open(sources.parent / "out")
    expected = [witness.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert folder.tokens.tolist() == list(chain(*expected))
    assert np.diff(folder.documents).tolist() == [len(ids) for ids in expected]
    assert folder.decode(folder.tokens) == "".join(TEXTS)
    assert info.text_bytes == len("".join(TEXTS).encode())
    assert (folder.path / "tokenizer.json").read_bytes() == path.read_bytes()


def test_a_document_without_tokens_is_left_out(tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "tokenizer.json", 9)
    (tmp_path / "a.jsonl").write_text('{"text": "w1"}\n{"text": "   "}\n{"text": "w2 w3"}\n')
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=tmp_path)
    assert TokenFolder.open(tmp_path / "out").documents.tolist() == [0, 1, 3]


def test_a_separator_ends_every_document(sources: Path) -> None:
    path = sources.parent / "tokenizer.json"
    end = trained_tokenizer(path, TEXTS).token_to_id("<end>")
    prepare([sources], sources.parent / "out", tokenizer=path, separator="<end>")
    folder = TokenFolder.open(sources.parent / "out")
    assert folder.info.separator == end
    assert np.flatnonzero(folder.tokens == end).tolist() == (folder.documents[1:] - 1).tolist()
    assert folder.decode(folder.tokens) == "<end>".join([*TEXTS, ""])


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32")],
)
def test_the_smallest_type_that_holds_the_vocabulary_is_used(
    tmp_path: Path, vocab_size: int, dtype: str
) -> None:
    word_tokenizer(tmp_path / "tokenizer.json", vocab_size)
    (tmp_path / "a.txt").write_text(f"w1 w{vocab_size - 1} w2 w3")
    info = prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer=tmp_path)
    folder = TokenFolder.open(tmp_path / "out")
    assert (info.dtype, info.vocab_size) == (dtype, vocab_size)
    assert folder.tokens.tolist() == [1, vocab_size - 1, 2, 3]  # neither cut nor padded
    folder.verify()


def test_many_documents_go_through_many_batches_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terashard.data.tokens._BATCH_CHARACTERS", 50)
    monkeypatch.setattr("terashard.data.tokens._BATCH_DOCUMENTS", 7)
    texts = [f"document {n}" * (n % 9) or "x" for n in range(200)]
    folder = text_folder(tmp_path, texts)
    assert bytes(folder.tokens).decode() == "".join(texts)
    assert folder.info.documents == 200
    folder.verify()


def test_a_part_of_a_corpus_can_be_prepared_and_progress_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "t{n}"}}\n' for n in range(50)))
    corpus = load_corpus([tmp_path / "a.jsonl"])
    told: list[int] = []
    infos = [
        prepare(part, tmp_path / f"out{number}", progress=told.append)
        for number, part in enumerate(split_documents(corpus, 0.3))
    ]
    assert sum(info.documents for info in infos) == 50
    assert sum(told) == corpus.stored_bytes()


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    line = '{"text": "' + "abcdefgh" * 500 + '"}\n'
    (tmp_path / "a.jsonl").write_text(line * 6000)  # 24 MB
    tracemalloc.start()
    try:
        info = prepare([tmp_path / "a.jsonl"], tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert info.tokens == 24_000_000
    assert peak < 8e6


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file may grow beyond ``size`` bytes: writing fails as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [100, 2_500_000])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.txt").write_text("x" * 3_000_000)
    with (
        file_size_limit(size),
        pytest.raises(DataError, match=r"cannot write .*out: .*; nothing was left behind"),
    ):
        prepare([tmp_path / "a.txt"], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_an_interruption_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(stored_bytes: int) -> None:
        raise KeyboardInterrupt

    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(KeyboardInterrupt):
        prepare([tmp_path / "a.txt"], tmp_path / "out", progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="the corpus is empty: none of 1 files holds text"):
        prepare([tmp_path / "a.txt"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_refused_unless_empty(sources: Path) -> None:
    out = sources.parent / "out"
    out.mkdir()
    prepare([sources], out)
    with pytest.raises(DataError, match=r"out exists already; choose another folder"):
        prepare([sources], out)
    with pytest.raises(DataError, match=r"0\.txt exists already"):
        prepare([sources], sources / "0.txt")
    TokenFolder.open(out).verify()


def test_tokenizers_that_do_not_fit_are_refused(sources: Path) -> None:
    out, path = sources.parent / "out", sources.parent / "tokenizer.json"
    with pytest.raises(DataError, match=r"no tokenizer .*tokenizer\.json; give 'bytes', or"):
        prepare([sources], out, tokenizer=path)
    path.write_text("{}")
    with pytest.raises(DataError, match=r"is no tokenizer\.json that can be read"):
        prepare([sources], out, tokenizer=path)
    trained_tokenizer(path, TEXTS)
    with pytest.raises(DataError, match=r"has no token '<eos>'; name a token of its vocabulary"):
        prepare([sources], out, tokenizer=path, separator="<eos>")
    with pytest.raises(DataError, match="the byte tokenizer has no token for the separator"):
        prepare([sources], out, separator="<eos>")


def edit(**changes: object) -> Callable[[Path], None]:
    def change(out: Path) -> None:
        record = json.loads((out / "tokens.json").read_text())
        (out / "tokens.json").write_text(json.dumps(record | changes))

    return change


def shorten(name: str, to: int) -> Callable[[Path], None]:
    return lambda out: (out / name).write_bytes((out / name).read_bytes()[:to]) and None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda out: (out / "tokens.json").unlink(), r"holds no prepared tokens; make them with"),
        (edit(format="other"), r"tokens\.json is not of format terashard-tokens"),
        (edit(version=2), r"has version 2 of terashard-tokens, but this terashard reads version 1"),
        (edit(tokens="many"), r"tokens\.json is damaged \(no usable tokens\)"),
        (edit(dtype="int8"), r"tokens\.json is damaged \(no usable dtype\)"),
        (shorten("tokens.json", 9), r"tokens\.json is damaged \(.*\); prepare the data again"),
        (shorten("tokens.bin", 9), r"tokens\.bin is damaged \(it has 9 bytes, .* promises 28\)"),
        (shorten("tokens.bin", 0), r"tokens\.bin is damaged \(it has 0 bytes"),
        (lambda out: (out / "tokens.bin").unlink(), r"tokens\.bin is damaged \(it has 0 bytes"),
        (shorten("documents.npy", 140), r"documents\.npy is damaged"),
        (shorten("documents.npy", 0), r"documents\.npy is damaged"),
        (lambda out: (out / "documents.npy").unlink(), r"documents\.npy is damaged"),
        (edit(documents=2), r"documents\.npy is damaged \(it holds int64 \(4,\), expected"),
        (
            lambda out: np.save(out / "documents.npy", np.array([0, 1, 2, 3])),
            r"documents\.npy is damaged \(it covers tokens 0 to 3 of 28\)",
        ),
    ],
)
def test_opening_a_damaged_folder_says_what_is_wrong(
    sources: Path, damage: Callable[[Path], None], message: str
) -> None:
    out = sources.parent / "out"
    prepare([sources], out)
    damage(out)
    with pytest.raises(DataError, match=message):
        TokenFolder.open(out)


def test_verify_finds_a_changed_token_and_a_changed_offset(sources: Path) -> None:
    out = sources.parent / "out"
    prepare([sources], out)
    raw = bytearray((out / "tokens.bin").read_bytes())
    raw[3] ^= 1
    (out / "tokens.bin").write_bytes(raw)
    with pytest.raises(DataError, match=r"tokens\.bin is damaged \(its checksum"):
        TokenFolder.open(out).verify()
    raw[3] ^= 1
    (out / "tokens.bin").write_bytes(raw)
    np.save(out / "documents.npy", np.array([0, 19, 16, 28]))
    with pytest.raises(DataError, match=r"documents\.npy is damaged \(its offsets do not grow"):
        TokenFolder.open(out).verify()


def test_token_info_survives_saving(tmp_path: Path) -> None:
    info = text_folder(tmp_path, ["a"]).info
    info.save(tmp_path / "again.json")
    assert TokenInfo.load(tmp_path / "again.json") == info
