"""Documents out of files: what to read, in which order, and which part is held out.

A *document* is one file (.txt, .md, .rst, .py) or one line of a JSON-lines file (.jsonl). A
``Corpus`` is a value: a sorted list of files and how to read them; the text itself is read while
iterating, one document at a time. Bytes that are no text in the given encoding become U+FFFD, and
every document says how many did.

The held-out split is by document and depends on its name only: ``blake2b(name)`` is read as a
number in [0, 1), and a corpus keeps the documents whose number lies in its part. Names are relative
to the folder that was given, so that two machines split the same folder alike.
"""

import codecs
import json
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from terashard.errors import DataError

SUFFIXES = (".jsonl", ".md", ".py", ".rst", ".txt")
"""What is read of a folder; everything but .jsonl is plain text."""

_SKIPPED = frozenset({"__pycache__"})
_NOT_LIBRARY = _SKIPPED | frozenset(
    ("test", "tests", "idlelib", "turtledemo", "site-packages", "dist-packages")
)
_GENERATED = re.compile(r"_sysconfigdata_.*|_sysconfig_vars_.*")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Document:
    """One text, and where it came from."""

    name: str
    """Path relative to the folder that was given; with ``:line`` in a JSON-lines file."""
    text: str
    """Never empty; always encodable as UTF-8."""
    stored_bytes: int
    """Bytes that it takes in its file."""
    replaced: int = 0
    """Characters U+FFFD that stand for undecodable bytes."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file of a corpus."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Files in a fixed order; iterating reads them, one non-empty ``Document`` at a time.

    Iterating raises ``DataError`` at a file that cannot be read, and at a line that is no JSON
    object with the field.
    """

    sources: tuple[Source, ...]
    """Files to read, in order."""
    field: str = "text"
    """Key of the text in JSON-lines files."""
    encoding: str = "utf-8"
    """Encoding of plain-text files; JSON lines are UTF-8 by definition."""
    part: tuple[float, float] = (0.0, 1.0)
    """Half-open part of [0, 1) in which the hash of a document's name must lie."""

    def __post_init__(self) -> None:
        """Refuse an encoding that Python does not know."""
        try:
            b"text".decode(self.encoding, "replace")
        except (LookupError, ValueError):
            raise DataError(
                f"unknown encoding {self.encoding!r}; name one that Python knows,"
                " such as utf-8 or latin-1"
            ) from None

    def __iter__(self) -> Iterator[Document]:
        for source in self.sources:
            lines = source.path.suffix == ".jsonl"
            yield from self._json_lines(source) if lines else self._whole_file(source)

    def stored_bytes(self) -> int:
        """Size of all files together, whatever part is kept."""
        return sum(_stat_size(source.path) for source in self.sources)

    def _keeps(self, name: str) -> bool:
        return self.part[0] <= name_fraction(name) < self.part[1]

    def _whole_file(self, source: Source) -> Iterator[Document]:
        if not self._keeps(source.name):
            return
        try:
            raw = source.path.read_bytes()
        except OSError as error:
            raise _unreadable(source.path, error) from None
        text, replaced = _decode(raw, self.encoding)
        if text:
            yield Document(source.name, text, len(raw), replaced)

    def _json_lines(self, source: Source) -> Iterator[Document]:
        try:
            with source.path.open("rb") as file:
                for number, raw in enumerate(file, 1):
                    name = f"{source.name}:{number}"
                    if raw.strip() and self._keeps(name):
                        line, undecodable = _decode(raw, "utf-8")
                        text, lone = self._text_of(line, f"{source.path}:{number}")
                        if text:
                            yield Document(name, text, len(raw), undecodable + lone)
        except OSError as error:
            raise _unreadable(source.path, error) from None

    def _text_of(self, line: str, where: str) -> tuple[str, int]:
        """The text of one JSON line; lone surrogates, which UTF-8 cannot hold, are replaced."""
        try:
            record = json.loads(line, parse_int=float)  # of any length; only the text matters
        except ValueError as error:
            raise DataError(
                f"{where} is not JSON ({error}); every line must be one JSON object"
            ) from None
        except RecursionError:
            raise DataError(
                f"{where} is nested too deeply to be read; leave the line out, or flatten it"
            ) from None
        if not isinstance(record, dict):
            raise DataError(
                f"{where} is a JSON {type(record).__name__}; every line must be an object"
                f' such as {{"{self.field}": "..."}}'
            )
        text = record.get(self.field)
        if not isinstance(text, str):
            raise DataError(_no_text(record, self.field, where))
        return (text, 0) if text.isascii() else _LONE_SURROGATE.subn("\ufffd", text)


def load_corpus(
    paths: Sequence[str | Path], *, field: str = "text", encoding: str = "utf-8"
) -> Corpus:
    """Files and folders as one corpus; a file named twice counts once.

    Folders are read recursively, sorted by relative name, without hidden entries.
    """
    if not paths:
        raise DataError(f"no paths were given; give files or folders of {_allowed()}")
    found: dict[Path, Source] = {}
    for path in map(Path, paths):
        for source in _sources_of(path):
            found.setdefault(source.path.resolve(), source)
    if not found:
        raise DataError(
            f"no files to read in {', '.join(map(str, paths))};"
            f" give files or folders of {_allowed()}"
        )
    return Corpus(sources=tuple(found.values()), field=field, encoding=encoding)


def standard_library_sources() -> Corpus:
    """The Python standard library's own sources on this machine.

    Tests, applications (idlelib, turtledemo), installed packages and generated files are left out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    corpus = [
        source
        for source in (_walk(root, _NOT_LIBRARY) if root.is_dir() else ())
        if source.path.suffix == ".py" and not _GENERATED.fullmatch(source.path.stem)
    ]
    if not corpus:
        raise DataError(
            f"no Python sources in {root}; this Python comes without the sources of its standard"
            " library: use another Python, or prepare a text of your own"
        )
    return Corpus(sources=tuple(corpus))


def split_documents(corpus: Corpus, held_out: float) -> tuple[Corpus, Corpus]:
    """Cut ``corpus`` by document into (training, held out), the second about ``held_out`` of it."""
    if not 0.0 < held_out < 1.0:
        raise DataError(f"the held-out part is {held_out}; it must lie between 0 and 1")
    low, high = corpus.part
    cut = high - (high - low) * held_out
    return replace(corpus, part=(low, cut)), replace(corpus, part=(cut, high))


def name_fraction(name: str) -> float:
    """The number in [0, 1) that a document's name stands for: 53 bits of its blake2b."""
    digest = blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def _sources_of(path: Path) -> Iterator[Source]:
    if path.is_dir():
        yield from _walk(path)
    elif not path.exists():
        raise DataError(f"{path} does not exist; give files or folders of {_allowed()}")
    elif path.suffix and path.suffix not in SUFFIXES:
        raise DataError(f"{path} is no kind of text known here; give {_allowed()}, or a folder")
    else:
        yield Source(path.name, path)


def _walk(root: Path, skipped: frozenset[str] = _SKIPPED) -> Iterator[Source]:
    """Files of known kinds below ``root``, sorted by relative name, outside ``skipped`` folders."""
    names = []
    for folder, below, files in os.walk(root, onerror=_refuse):
        below[:] = [name for name in below if name[0] != "." and name not in skipped]
        for name in files:
            if name[0] != "." and name.endswith(SUFFIXES):
                names.append((Path(folder) / name).relative_to(root).as_posix())
    return (Source(name, root / name) for name in sorted(names))


def _decode(raw: bytes, encoding: str) -> tuple[str, int]:
    """Text without byte-order mark, and how many U+FFFD stand for bytes that do not decode."""
    if codecs.lookup(encoding).name == "utf-8":
        encoding = "utf-8-sig"
    try:
        return raw.decode(encoding), 0
    except UnicodeDecodeError:
        text = raw.decode(encoding, "replace")
        genuine = raw.decode(encoding, "ignore").count("\ufffd")
        return text, text.count("\ufffd") - genuine


def _no_text(record: dict[str, object], field: str, where: str) -> str:
    if field in record:
        return f"{where}: {field!r} is no string; name the field that holds the text"
    names = ", ".join(map(repr, record)) or "none"
    return f"{where} has no field {field!r}; its fields: {names}; name the one that holds the text"


def _allowed() -> str:
    return f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"


def _stat_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from None


def _refuse(error: OSError) -> None:
    raise _unreadable(Path(str(error.filename)), error)


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"cannot read {path}: {error.strerror}; make it readable, or leave it out")
