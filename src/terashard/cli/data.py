"""``terashard data prepare``: text files in, a memory-mapped token folder out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from terashard.data.corpus import load_corpus
from terashard.data.tokens import TokenInfo, prepare
from terashard.units import show_bytes, show_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Turn text into tokens: one memory-mapped token file and an index of the documents."""

    paths: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="PATH...", help_behavior_hint="(one or more)"),
    ]
    """Files, or folders to search, of .jsonl, .md, .py, .rst or .txt."""
    out: Annotated[Path, tyro.conf.arg(aliases=("-o",), metavar="DIR")]
    """New folder for the tokens."""
    tokenizer: Annotated[str, tyro.conf.arg(metavar="bytes|FILE")] = "bytes"
    """"bytes", or the path of a Hugging Face tokenizer.json."""
    separator: Annotated[str | None, tyro.conf.arg(metavar="TOKEN")] = None
    """Token of the tokenizer to append to every document, such as "<|endoftext|>"."""
    field: Annotated[str, tyro.conf.arg(metavar="NAME")] = "text"
    """Field of JSON lines that holds the text."""
    encoding: Annotated[str, tyro.conf.arg(metavar="NAME")] = "utf-8"
    """Encoding of the other files; what it cannot decode is replaced and counted."""


def run(args: Prepare) -> int:
    """Prepare, print a summary, return the exit status."""
    corpus = load_corpus(args.paths, field=args.field, encoding=args.encoding)
    console = Console(highlight=False)
    with _progress(console, corpus.stored_bytes()) as bar:
        info = prepare(
            corpus,
            args.out,
            tokenizer=args.tokenizer,
            separator=args.separator,
            progress=lambda stored_bytes: bar.advance(bar.task_ids[0], stored_bytes),
        )
    console.print(_summary(args, info, len(corpus.sources)))
    console.print(_next_step(args.out))
    return 0


@contextmanager
def _progress(console: Console, total_bytes: int) -> Iterator[Progress]:
    """A bar that vanishes at the end; nothing at all where the output is no terminal."""
    columns = (
        TextColumn("encoding"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        bar.add_task("encoding", total=total_bytes)
        yield bar


def _summary(args: Prepare, info: TokenInfo, files: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("documents", f"{info.documents:,} from {show_count(files, 'file')}")
    table.add_row("tokens", f"{info.tokens:,}, {info.bytes_per_token:.3g} bytes of text each")
    table.add_row("vocabulary", f"{info.vocab_size:,}, stored as {info.dtype}")
    table.add_row("tokenizer", Text(_tokenizer(args)))
    table.add_row("size", show_bytes(info.file_bytes))
    table.add_row("folder", Text(str(args.out)))
    if info.replaced:
        replaced = (
            f"{show_count(info.replaced, 'character')} could not be decoded as {args.encoding}"
        )
        table.add_row("replaced", Text(replaced, style="yellow"))
    return table


def _tokenizer(args: Prepare) -> str:
    return args.tokenizer + (f", {args.separator} after each document" if args.separator else "")


def _next_step(out: Path) -> Text:
    return Text.assemble(
        "\nTo train on it, write into a run file:\n", f'  [data]\n  train = "{out}"'
    )
