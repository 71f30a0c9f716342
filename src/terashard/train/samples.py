"""The training and held-out sequences of a run, and the rows of a global batch that one data-parallel rank draws."""

from dataclasses import dataclass

import torch

from terashard.comm.mesh import Mesh
from terashard.config.schema import RunConfig
from terashard.data.batches import Batch, Cursor, SequenceSource, batch, held_out
from terashard.data.tokens import TokenFolder
from terashard.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Where sequences come from; ``held_out`` is None when nothing is held out."""

    training: SequenceSource
    held_out: SequenceSource | None
    sequences: int
    rows: range

    @classmethod
    def of(cls, config: RunConfig, mesh: Mesh) -> "Samples":
        """The sequences that ``config`` names, for the data-parallel rank at ``mesh``."""
        folder, length = TokenFolder.open(config.data.train), config.batch.tokens
        part = 0.0 if config.data.validation else config.data.held_out
        kept, withheld = held_out(folder, part)
        training = SequenceSource(
            folder=folder,
            length=length,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            first=kept.start,
            last=kept.stop,
        )
        at, ranks = mesh.coordinates, mesh.replicas * mesh.shards
        each, place = config.batch.sequences // ranks, at.replica * mesh.shards + at.shard
        return cls(
            training=training,
            held_out=_held_out(config, folder, withheld),
            sequences=config.batch.sequences,
            rows=range(place * each, (place + 1) * each),
        )

    def draw(self, cursor: Cursor) -> Batch:
        """This rank's rows of the global batch at ``cursor``."""
        return batch(self.training, cursor.sample, self.sequences, self.rows)

    def draw_held_out(self, index: int, ignore_index: int) -> Batch | None:
        """This rank's rows of held-out batch ``index``; targets past the end are ignored. None when all were drawn."""
        source = self.held_out
        if source is None or index * self.sequences >= source.num_samples:
            return None
        drawn = batch(source, index * self.sequences, self.sequences, self.rows)
        real = (
            torch.arange(self.rows.start, self.rows.stop) + index * self.sequences
            < source.num_samples
        )
        return Batch(drawn.tokens, drawn.targets.masked_fill(~real[:, None], ignore_index))


def _held_out(config: RunConfig, folder: TokenFolder, withheld: range) -> SequenceSource | None:
    """Held-out sequences in the order of the file."""
    length = config.batch.tokens
    if config.data.validation:
        other = TokenFolder.open(config.data.validation)
        if other.vocab_size != folder.vocab_size:
            raise DataError(
                f"data.validation has a vocabulary of {other.vocab_size} tokens, data.train one of {folder.vocab_size};"
                " prepare both with the same tokenizer"
            )
        return SequenceSource(folder=other, length=length, shuffle=False)
    if len(withheld) <= length:
        return None
    return SequenceSource(
        folder=folder, length=length, shuffle=False, first=withheld.start, last=withheld.stop
    )
