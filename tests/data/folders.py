"""Small token folders and tokenizers for tests."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from terashard.data.tokens import TokenFolder, TokenInfo, prepare


def text_folder(path: Path, texts: Sequence[str]) -> TokenFolder:
    """Byte tokens of ``texts``, one document each."""
    sources = path / "texts"
    sources.mkdir(parents=True)
    for number, text in enumerate(texts):
        (sources / f"{number:04}.txt").write_text(text)
    prepare([sources], path / "tokens")
    return TokenFolder.open(path / "tokens")


def counting_folder(
    path: Path, tokens: int, vocab_size: int | None = None, documents: Sequence[int] = ()
) -> TokenFolder:
    """Tokens 0, 1, 2, …: a token says where it stands. ``documents`` are inner boundaries."""
    path.mkdir(parents=True)
    np.arange(tokens, dtype="<u4").tofile(path / "tokens.bin")
    np.save(path / "documents.npy", np.array([0, *documents, tokens], dtype=np.int64))
    info = TokenInfo(
        dtype="uint32",
        tokens=tokens,
        documents=len(documents) + 1,
        vocab_size=vocab_size or tokens,
        tokenizer="bytes",
        separator=None,
        text_bytes=tokens,
        replaced=0,
        checksum="",
    )
    info.save(path / "tokens.json")
    return TokenFolder.open(path)


def trained_tokenizer(path: Path, texts: Sequence[str], vocab_size: int = 300) -> Tokenizer:
    """A byte-level BPE with the special token <end>, saved to ``path``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return tokenizer


def word_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """Words w0, w1, … with their number as id, saved to ``path`` set to cut and to pad texts."""
    words = {f"w{number}": number for number in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))
    return tokenizer
