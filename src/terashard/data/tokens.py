"""A prepared token folder: written once, then memory-mapped by every rank.

::

    DIR/tokens.bin        ids of all documents, one after the other; little-endian unsigned integers
    DIR/documents.npy     int64 [D+1]: document d is tokens[documents[d] : documents[d+1]]
    DIR/tokens.json       format, version, counts, vocabulary, tokenizer, checksum
    DIR/tokenizer.json    copy of the tokenizer, unless it is the byte tokenizer

``prepare`` holds one batch of documents at a time (at least the longest document), so memory does
not grow with the corpus. It writes beside DIR and renames at the end: DIR is complete or not there.
``TokenFolder.open`` checks format, sizes and the ends of the index without reading the tokens;
``verify`` reads all of it.

Shapes: D documents, T tokens.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from terashard.data.corpus import Corpus, Document, load_corpus
from terashard.data.tokenizer import BYTES, Tokenizer, load_tokenizer, tokenizer_file
from terashard.data.writer import TokenWriter, new_folder
from terashard.errors import DataError

FORMAT = "terashard-tokens"
VERSION = 1
_DTYPES = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInfo:
    """What ``tokens.json`` says."""

    dtype: str
    """Type of a stored id: uint8, uint16 or uint32, the smallest that holds the vocabulary."""
    tokens: int
    """T."""
    documents: int
    """D."""
    vocab_size: int
    """Every id is below it."""
    tokenizer: str
    """"bytes" or "tokenizer.json"."""
    separator: int | None
    """Id that ends every document, or None."""
    text_bytes: int
    """Bytes of the text in UTF-8: nats per byte = nats per token x tokens / text_bytes."""
    replaced: int
    """Characters put in for bytes that could not be decoded."""
    checksum: str
    """blake2b of tokens.bin, 16 bytes in hexadecimal."""

    @property
    def file_bytes(self) -> int:
        """Size of tokens.bin."""
        return self.tokens * np.dtype(_DTYPES[self.dtype]).itemsize

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text that one token stands for, on average."""
        return self.text_bytes / self.tokens

    def save(self, path: Path) -> None:
        """Write as JSON, with format and version."""
        record = {"format": FORMAT, "version": VERSION, **asdict(self)}
        path.write_text(json.dumps(record, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read and check ``tokens.json``."""
        record = _json_object(path)
        if record.get("format") != FORMAT:
            raise DataError(
                f"{path} is not of format {FORMAT}; give a folder made by `terashard data prepare`"
            )
        if record.get("version") != VERSION:
            raise DataError(
                f"{path} has version {record.get('version')} of {FORMAT}, but this terashard reads"
                f" version {VERSION}; prepare the data again"
            )
        kinds: dict[str, Any] = {field.name: field.type for field in fields(cls)}
        wrong = [
            name for name, kind in kinds.items() if not isinstance(record.get(name, ...), kind)
        ]
        if wrong or record["dtype"] not in _DTYPES:
            raise _damaged(path, f"no usable {', '.join(wrong) or 'dtype'}")
        return cls(**{name: record[name] for name in kinds})


@dataclass(frozen=True, slots=True, eq=False)
class TokenFolder:
    """A prepared folder, opened for reading; nothing of it is in memory until it is used."""

    path: Path
    info: TokenInfo
    tokens: NDArray[np.unsignedinteger]
    """[T], memory-mapped."""
    documents: NDArray[np.int64]
    """[D+1] offsets into ``tokens``, memory-mapped."""

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open what ``prepare`` wrote; ``DataError`` if missing, damaged or of another version."""
        folder = Path(path)
        if not folder.exists():
            raise DataError(
                f"{folder} does not exist (seen from {Path.cwd()}); name a folder that"
                f" `terashard data prepare PATH... -o {folder}` has made"
            )
        if not (folder / "tokens.json").is_file():
            raise DataError(
                f"{folder} holds no prepared tokens;"
                f" make them with `terashard data prepare PATH... -o {folder}`"
            )
        info = TokenInfo.load(folder / "tokens.json")
        return cls(folder, info, _map_tokens(folder, info), _map_documents(folder, info))

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""
        return self.info.vocab_size

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""
        name = BYTES if self.info.tokenizer == BYTES else self.path / self.info.tokenizer
        return load_tokenizer(name)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Text of ``ids``. Loads the tokenizer each time; keep ``tokenizer()`` to decode often."""
        return self.tokenizer().decode(np.asarray(ids, dtype=np.int64))

    def verify(self) -> None:
        """Read every token and offset; ``DataError`` if one of them is not what was written."""
        digest = blake2b(digest_size=16)
        for start in range(0, self.info.tokens, 1 << 24):
            digest.update(self.tokens[start : start + (1 << 24)].data)
        if digest.hexdigest() != self.info.checksum:
            raise _damaged(self.path / "tokens.bin", "its checksum is not the one in tokens.json")
        if np.any(np.diff(self.documents) <= 0):
            raise _damaged(self.path / "documents.npy", "its offsets do not grow")


def prepare(
    source: Corpus | Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path = BYTES,
    separator: str | None = None,
    progress: Callable[[int], None] = lambda stored_bytes: None,
) -> TokenInfo:
    """Encode files and folders into the new folder ``out``; give a ``Corpus`` for all its options.

    ``tokenizer`` is "bytes" or the path of a ``tokenizer.json``; ``separator`` names a token of it
    that is appended to every document. ``progress`` is told how many bytes of the files each batch
    of documents took.
    """
    corpus = source if isinstance(source, Corpus) else load_corpus(source)
    coder = load_tokenizer(tokenizer, separator)
    dtype = next(name for name, code in _DTYPES.items() if _holds(code, coder.vocab_size))
    with new_folder(Path(out)) as folder:
        with TokenWriter(folder, np.dtype(_DTYPES[dtype])) as writer:
            for documents in _batches(corpus):
                writer.append(documents, coder.encode([document.text for document in documents]))
                progress(sum(document.stored_bytes for document in documents))
        if not writer.tokens:
            raise DataError(
                f"the corpus is empty: none of {len(corpus.sources)} files holds text;"
                " give files with text"
            )
        if str(tokenizer) != BYTES:
            shutil.copyfile(tokenizer_file(tokenizer), folder / "tokenizer.json")
        info = TokenInfo(
            dtype=dtype,
            tokens=writer.tokens,
            documents=writer.documents,
            vocab_size=coder.vocab_size,
            tokenizer=BYTES if str(tokenizer) == BYTES else "tokenizer.json",
            separator=coder.separator,
            text_bytes=writer.text_bytes,
            replaced=writer.replaced,
            checksum=writer.checksum(),
        )
        info.save(folder / "tokens.json")
    return info


def _batches(corpus: Corpus) -> Iterator[list[Document]]:
    """Lists of documents of a million characters: enough to keep a parallel tokenizer busy."""
    batch: list[Document] = []
    characters = 0
    for document in corpus:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _holds(code: str, vocab_size: int) -> bool:
    return vocab_size - 1 <= int(np.iinfo(code).max)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from None
    return record if isinstance(record, dict) else {}


def _map_tokens(folder: Path, info: TokenInfo) -> NDArray[np.unsignedinteger]:
    path = folder / "tokens.bin"
    found = path.stat().st_size if path.is_file() else 0
    if found != info.file_bytes or not found:
        raise _damaged(path, f"it has {found} bytes, tokens.json promises {info.file_bytes}")
    mapped = np.memmap(path, dtype=_DTYPES[info.dtype], mode="r")
    return mapped.view(np.ndarray)  # the subclass makes every slice three times as slow


def _map_documents(folder: Path, info: TokenInfo) -> NDArray[np.int64]:
    path = folder / "documents.npy"
    try:
        offsets: NDArray[np.int64] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(path, str(error)) from None
    expected = (info.documents + 1,)
    if offsets.dtype != np.int64 or offsets.shape != expected:
        raise _damaged(path, f"it holds {offsets.dtype} {offsets.shape}, expected int64 {expected}")
    if offsets[0] != 0 or offsets[-1] != info.tokens:
        raise _damaged(path, f"it covers tokens {offsets[0]} to {offsets[-1]} of {info.tokens}")
    return offsets


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(f"{path} is damaged ({reason}); prepare the data again")
