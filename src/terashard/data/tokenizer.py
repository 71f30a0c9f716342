"""Text to token ids and back: bytes, or any Hugging Face ``tokenizer.json``.

The byte tokenizer has a vocabulary of exactly 256 and no separator: every token is one byte of
UTF-8, so nats per token *are* nats per byte, a bigram table over the same stream is a fair
yardstick, and a token takes one byte on disk (a 257th token would take two). Where documents begin
stands in the index of the token folder.

A ``tokenizer.json`` is used without the special tokens its template would add around a text (they
belong to prompts, not to documents); name a ``separator`` token to have it appended to every
document.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from terashard.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

BYTES = "bytes"
"""Name of the built-in tokenizer."""


class Tokenizer(Protocol):
    """What ``prepare`` asks of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""

    @property
    def separator(self) -> int | None:
        """Id appended to every document, or None."""

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Ids of every text, the separator included."""

    def decode(self, ids: NDArray[np.integer]) -> str:
        """Text of ``ids``; what is no complete character becomes U+FFFD."""


class ByteTokenizer:
    """UTF-8 bytes as ids."""

    vocab_size = 256
    separator = None

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Bytes of every text."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: NDArray[np.integer]) -> str:
        """Text of the bytes ``ids``; a torn character becomes U+FFFD."""
        return np.asarray(ids).astype(np.uint8).tobytes().decode(errors="replace")


class FileTokenizer:
    """A Hugging Face ``tokenizer.json``; the token ``separator`` ends every document."""

    def __init__(self, path: Path, separator: str | None = None) -> None:
        self._inner = _load(path)
        self.vocab_size = (
            max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )
        self.separator: int | None = None
        if self.vocab_size == 0:
            raise DataError(f"the vocabulary of {path} is empty; give a trained tokenizer")
        if separator is not None:
            self.separator = self._inner.token_to_id(separator)
            if self.separator is None:
                raise DataError(
                    f"{path} has no token {separator!r};"
                    " name a token of its vocabulary as separator, or none"
                )

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Ids of every text, in parallel, the separator after each."""
        end = [] if self.separator is None else [self.separator]
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids + end, dtype=np.uint32) for one in encoded]

    def decode(self, ids: NDArray[np.integer]) -> str:
        """Text of ``ids``, special tokens included."""
        text: str = self._inner.decode(np.asarray(ids).tolist(), skip_special_tokens=False)
        return text


def load_tokenizer(name: str | Path, separator: str | None = None) -> Tokenizer:
    """``"bytes"``, a ``tokenizer.json``, or a folder that holds one."""
    if str(name) != BYTES:
        return FileTokenizer(tokenizer_file(name), separator)
    if separator is not None:
        raise DataError(
            f"the byte tokenizer has no token for the separator {separator!r};"
            " leave it out (document boundaries are kept in the index), or give a tokenizer.json"
        )
    return ByteTokenizer()


def tokenizer_file(name: str | Path) -> Path:
    """The ``tokenizer.json`` that ``name`` stands for."""
    path = Path(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"no tokenizer {path}; give 'bytes', or the path of a tokenizer.json")
    return path


def _load(path: Path) -> "HuggingFaceTokenizer":
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    try:
        tokenizer = HuggingFaceTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path} is no tokenizer.json that can be read: {error}") from None
    # A tokenizer saved by a fine-tuning script often cuts texts at 512 tokens or pads them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
