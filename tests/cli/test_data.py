import re
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from terashard.cli.data import Prepare, run
from terashard.data.tokens import TokenFolder
from terashard.errors import DataError
from tests.data.folders import trained_tokenizer


def prepare(*argv: object) -> int:
    return run(tyro.cli(Prepare, args=[str(value) for value in argv]))


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_the_summary_says_what_was_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"x" * 2000 + b"\xff")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert prepare("a.txt", "b.jsonl", "-o", "out") == 0
    assert printed(capsys) == [
        "documents   3 from 2 files",
        "tokens      2,009, 1 bytes of text each",
        "vocabulary  256, stored as uint8",
        "tokenizer   bytes",
        "size        1.96 KiB",
        "folder      out",
        "replaced    1 character could not be decoded as utf-8",
        "",
        "To train on it, write into a run file:",
        "  [data]",
        '  train = "out"',
    ]


def test_tokenizer_separator_field_and_encoding_reach_the_folder(tmp_path: Path) -> None:
    trained_tokenizer(tmp_path / "tokenizer.json", ["café"])
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n')
    (tmp_path / "b.txt").write_bytes("café".encode("latin-1"))
    arguments = ("--tokenizer", tmp_path / "tokenizer.json", "--separator", "<end>")
    arguments += ("--field", "body", "--encoding", "latin-1")
    assert prepare(tmp_path, "--out", tmp_path / "out", *arguments) == 0
    folder = TokenFolder.open(tmp_path / "out")
    assert folder.decode(folder.tokens) == "one<end>café<end>"


def test_what_cannot_be_prepared_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no paths were given"):
        prepare("-o", tmp_path / "out")
    with pytest.raises(DataError, match=r"missing does not exist; give files or folders"):
        prepare(tmp_path / "missing", "-o", tmp_path / "out")


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prepare("--help")
    text = capsys.readouterr().out
    for option in ("PATH...", "-o DIR", "--tokenizer", "--separator", "--field", "--encoding"):
        assert option in text
    assert not re.search(r"\(default: \)", text)


@pytest.mark.processes
def test_preparing_bytes_imports_neither_torch_nor_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    code = (
        "import sys; from pathlib import Path; from terashard.cli.data import Prepare, run;"
        f"run(Prepare(paths=(Path({str(tmp_path)!r}),), out=Path({str(tmp_path / 'out')!r})));"
        "sys.exit(str({'torch', 'tokenizers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.strip() == "set()"
