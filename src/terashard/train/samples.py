"""The sequences of a run: which it trains on, which are held out, and how many steps that makes."""

import math
from dataclasses import dataclass

import torch

from terashard.checkpoint.index import JSON
from terashard.comm.mesh import Mesh
from terashard.config.schema import RunConfig
from terashard.data.batches import Batch, Cursor, SequenceSource, batch, held_out
from terashard.data.tokens import TokenFolder
from terashard.errors import DataError
from terashard.train.preflight import require_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Where the sequences of a run come from."""

    training: SequenceSource
    held_out: SequenceSource | None
    nothing_held_out: str
    """Why ``held_out`` is None."""
    sequences: int
    """Sequences of one global batch."""

    @classmethod
    def of(cls, config: RunConfig) -> "Samples":
        """The sequences that ``config`` names; ``DataError`` if there are too few tokens."""
        folder, data = TokenFolder.open(config.data.train), config.data
        kept, withheld = held_out(folder, 0.0 if data.validation else data.held_out)
        training = SequenceSource(
            folder=folder,
            length=config.batch.tokens,
            seed=config.run.seed,
            shuffle=data.shuffle,
            first=kept.start,
            last=kept.stop,
        )
        return cls(
            training=training,
            held_out=_held_out(config, folder, withheld),
            nothing_held_out=(
                f"data.held_out = {data.held_out:g} of {folder.info.tokens} tokens are"
                f" {len(withheld)}, no sequence of {config.batch.tokens} and its last target"
            ),
            sequences=config.batch.sequences,
        )

    def identity(self) -> dict[str, JSON]:
        """What decides which tokens a sample's number stands for, by the keys that state it."""
        source = self.training
        return {
            "data.train": source.folder.info.checksum,
            "batch.tokens": source.length,
            "data.held_out (or data.validation)": [source.first, source.stop],
            "data.shuffle": source.shuffle,
            "run.seed": source.seed if source.shuffle else 0,
        }

    def steps(self, config: RunConfig) -> int:
        """Steps of the whole run, rounded up."""
        train = config.train
        require_length(train)
        if train.steps is not None:
            return train.steps
        if train.tokens is not None:
            return math.ceil(train.tokens / (self.sequences * self.training.length))
        assert train.epochs is not None
        return math.ceil(train.epochs * self.training.num_samples / self.sequences)

    def draw(self, cursor: Cursor, rows: range) -> Batch:
        """Rows ``rows`` of the global batch at ``cursor``."""
        return batch(self.training, cursor.sample, self.sequences, rows)

    def draw_held_out(self, index: int, rows: range, ignore_index: int) -> Batch | None:
        """Rows ``rows`` of held-out batch ``index``, or None when all sequences were drawn.

        The last batch goes on from the beginning; targets that were drawn before are ignored.
        """
        source, first = self.held_out, index * self.sequences
        if source is None or first >= source.num_samples:
            return None
        drawn = batch(source, first, self.sequences, rows)
        new = torch.arange(first + rows.start, first + rows.stop) < source.num_samples
        return Batch(drawn.tokens, drawn.targets.masked_fill(~new[:, None], ignore_index))


def rows_of(config: RunConfig, mesh: Mesh) -> range:
    """The rows of every global batch that the data-parallel rank at ``mesh`` draws."""
    each = config.batch.sequences // (mesh.replicas * mesh.shards)
    place = mesh.coordinates.replica * mesh.shards + mesh.coordinates.shard
    return range(place * each, (place + 1) * each)


def _held_out(config: RunConfig, folder: TokenFolder, withheld: range) -> SequenceSource | None:
    """Held-out sequences in the order of the file."""
    length = config.batch.tokens
    if config.data.validation:
        other = TokenFolder.open(config.data.validation)
        if other.vocab_size != folder.vocab_size:
            raise DataError(
                f"data.validation has a vocabulary of {other.vocab_size} tokens, data.train one of"
                f" {folder.vocab_size}; prepare both with the same tokenizer"
            )
        return SequenceSource(folder=other, length=length, shuffle=False)
    if len(withheld) <= length:
        return None
    return SequenceSource(
        folder=folder, length=length, shuffle=False, first=withheld.start, last=withheld.stop
    )
