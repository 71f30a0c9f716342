import json
from pathlib import Path

import pytest

from terashard.data.corpus import (
    Corpus,
    load_corpus,
    name_fraction,
    split_documents,
    standard_library_sources,
)
from terashard.errors import DataError


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def texts(corpus: Corpus) -> dict[str, str]:
    return {document.name: document.text for document in corpus}


def test_a_folder_is_read_recursively_sorted_and_without_hidden_entries(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "B")
    write(tmp_path / "a" / "z.md", "Z")
    write(tmp_path / "a" / "y.py", "Y")
    write(tmp_path / "c.rst", "C")
    for skipped in (".git/a.txt", ".hidden.txt", "__pycache__/a.py", "image.png", "no_suffix"):
        write(tmp_path / skipped, "not this")
    found = texts(load_corpus([tmp_path]))
    assert list(found.items()) == [("a/y.py", "Y"), ("a/z.md", "Z"), ("b.txt", "B"), ("c.rst", "C")]


def test_files_keep_the_given_order_and_count_once(tmp_path: Path) -> None:
    second, first = write(tmp_path / "2.txt", "two"), write(tmp_path / "1.txt", "one")
    (tmp_path / "link.txt").symlink_to(first)
    assert list(texts(load_corpus([second, first, tmp_path]))) == ["2.txt", "1.txt"]


def test_a_named_file_without_suffix_is_plain_text(tmp_path: Path) -> None:
    assert texts(load_corpus([write(tmp_path / "enwik", "<page>")])) == {"enwik": "<page>"}


def test_each_json_line_is_a_document_and_the_field_can_be_chosen(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", lines({"text": "a", "x": "α"}) + "\n" + lines({"x": "β"}))
    assert texts(load_corpus([path], field="x")) == {"d.jsonl:1": "α", "d.jsonl:3": "β"}


def test_empty_documents_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "")
    write(tmp_path / "b.jsonl", lines({"text": ""}, {"text": "b"}))
    assert texts(load_corpus([tmp_path])) == {"b.jsonl:2": "b"}


def test_undecodable_bytes_are_replaced_and_counted_apart_from_genuine_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"caf\xe9 " + "\ufffd".encode() + b" \xff")
    (document,) = load_corpus([path])
    assert (document.text, document.replaced) == ("caf\ufffd \ufffd \ufffd", 2)
    assert document.stored_bytes == 10


def test_lone_surrogates_of_json_are_replaced_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rb'{"text": "\ud83d\ude00 \ud800"}' + b"\n")
    (document,) = load_corpus([path])
    assert (document.text, document.replaced) == ("\U0001f600 \ufffd", 1)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-8"])
def test_a_given_encoding_is_used_and_byte_order_marks_go(tmp_path: Path, encoding: str) -> None:
    raw = "café\r\n".encode("utf-8-sig" if encoding == "utf-8" else encoding)
    (document,) = load_corpus([write(tmp_path / "a.txt", raw)], encoding=encoding)
    assert (document.text, document.replaced) == ("café\r\n", 0)


def test_documents_are_read_only_when_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "A")
    write(tmp_path / "b.txt", "B")
    documents = iter(load_corpus([tmp_path]))
    (tmp_path / "a.txt").write_text("A, changed")
    assert next(documents).text == "A, changed"
    (tmp_path / "b.txt").unlink()
    with pytest.raises(DataError, match=r"cannot read .*b\.txt: No such file"):
        next(documents)


def test_the_split_is_a_partition_by_name_alone(tmp_path: Path) -> None:
    for number in range(300):
        write(tmp_path / "one" / f"{number}.txt", f"text {number}")
        write(tmp_path / "two" / f"{number}.txt", f"another text {number}")
    whole = load_corpus([tmp_path / "one"])
    train, held_out = split_documents(whole, 0.2)
    assert texts(train) | texts(held_out) == texts(whole)
    assert not set(texts(train)) & set(texts(held_out))
    assert 35 < len(texts(held_out)) < 85
    again = split_documents(load_corpus([tmp_path / "two"]), 0.2)
    assert [set(texts(part)) for part in again] == [set(texts(train)), set(texts(held_out))]


def test_a_part_can_be_split_again(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", lines(*({"text": str(n)} for n in range(300))))
    train, rest = split_documents(load_corpus([tmp_path]), 0.5)
    validation, test = split_documents(rest, 0.5)
    names = [set(texts(corpus)) for corpus in (train, validation, test)]
    assert sum(map(len, names)) == len(set.union(*names)) == 300
    assert min(map(len, names)) > 40


def test_the_hash_of_a_name_never_changes() -> None:
    assert name_fraction("json/decoder.py") == 0.0522723502018968


def test_the_standard_library_is_found_without_tests_and_packages() -> None:
    corpus = standard_library_sources()
    names = [source.name for source in corpus.sources]
    assert {"json/decoder.py", "asyncio/tasks.py", "typing.py"} <= set(names)
    assert names == sorted(names)
    assert len(names) > 400
    assert corpus.stored_bytes() > 5_000_000
    unwanted = ("test/", "idlelib/", "site-packages/", "_sysconfigdata", "lib2to3/tests/")
    assert not [name for name in names if name.startswith(unwanted)]


def test_a_python_without_sources_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / name))
    with pytest.raises(DataError, match=r"no Python sources in .*stdlib; .*use another Python"):
        standard_library_sources()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"a\.jsonl:1 is not JSON \(.*\); every line must be one JSON object"),
        ("[1]", r"a\.jsonl:1 is a JSON list; every line must be an object"),
        ('{"body": 1}', r"a\.jsonl:1 has no field 'text'; its fields: 'body'; name the one"),
        (
            '{"text": 1, "n": ' + "9" * 5000 + "}",
            r"a\.jsonl:1: 'text' is no string; name the field",
        ),
        ("[" * 200_000, r"a\.jsonl:1 is nested too deeply to be read; leave the line out"),
        ('{"text": 1}', r"a\.jsonl:1: 'text' is no string; name the field"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path: Path, content: str, message: str) -> None:
    corpus = load_corpus([write(tmp_path / "a.jsonl", content)])
    with pytest.raises(DataError, match=message):
        list(corpus)


def test_a_number_of_any_length_beside_the_text_is_no_fault(tmp_path: Path) -> None:
    """Python refuses to read whole numbers of more than 4300 digits."""
    path = write(tmp_path / "a.jsonl", '{"id": ' + "9" * 5000 + ', "text": "a"}')
    assert texts(load_corpus([path])) == {"a.jsonl:1": "a"}


def test_paths_that_hold_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt does not exist; give files or folders of"):
        load_corpus([tmp_path / "gone.txt"])
    with pytest.raises(DataError, match=r"a\.parquet is no kind of text known here; give \.jsonl"):
        load_corpus([write(tmp_path / "a.parquet", "PAR1")])
    with pytest.raises(DataError, match=r"no files to read in .*; give files or folders of"):
        load_corpus([tmp_path])
    with pytest.raises(DataError, match="no paths were given"):
        load_corpus([])


@pytest.mark.parametrize("encoding", ["klingon", "hex"])
def test_an_encoding_that_gives_no_text_is_refused(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(DataError, match=f"unknown encoding '{encoding}'"):
        load_corpus([write(tmp_path / "a.txt", "a")], encoding=encoding)


@pytest.mark.parametrize("part", [0.0, 1.0, -0.1])
def test_a_held_out_part_outside_0_to_1_is_refused(tmp_path: Path, part: float) -> None:
    with pytest.raises(DataError, match="it must lie between 0 and 1"):
        split_documents(load_corpus([write(tmp_path / "a.txt", "a")]), part)
