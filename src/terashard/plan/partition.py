"""How the sequences of a data-parallel rank are cut into micro-batches and slices."""

from collections.abc import Sequence

from terashard.config.schema import BatchConfig, ParallelConfig
from terashard.errors import PlanError
from terashard.schedule.actions import MicroBatch


def equal_slices(tokens: int, count: int) -> tuple[int, ...]:
    """``tokens`` in ``count`` slices that differ by one token at most, longer ones first."""
    if count > tokens:
        raise PlanError(
            f"{count} slices of a sequence of {tokens} tokens would be empty; use at most {tokens}"
        )
    each, rest = divmod(tokens, count)
    return tuple(each + (i < rest) for i in range(count))


def partition_of(
    parallel: ParallelConfig, batch: BatchConfig, sequences: int
) -> tuple[MicroBatch, ...]:
    """Micro-batches of the ``sequences`` of one data-parallel rank, or ``PlanError``."""
    if parallel.partition:
        return _given_partition(parallel, batch, sequences)
    if sequences % parallel.micro_batches:
        raise PlanError(
            f"{sequences} sequences per data-parallel rank cannot be cut into"
            f" parallel.micro_batches = {parallel.micro_batches} equal micro-batches; change"
            " batch.sequences or parallel.micro_batches"
        )
    one = len(parallel.slices) == 1
    slices = equal_slices(batch.tokens, parallel.slices[0]) if one else parallel.slices
    _check_sum("parallel.slices", slices, batch.tokens)
    return (MicroBatch(sequences // parallel.micro_batches, slices),) * parallel.micro_batches


def _given_partition(
    parallel: ParallelConfig, batch: BatchConfig, sequences: int
) -> tuple[MicroBatch, ...]:
    micros = tuple(MicroBatch(count, slices) for count, slices in parallel.partition)
    for micro in micros:
        _check_sum("parallel.partition", micro.slices, batch.tokens)
    total = sum(micro.sequences for micro in micros)
    if total != sequences:
        raise PlanError(
            f"the micro-batches of parallel.partition hold {total} sequences, but every"
            f" data-parallel rank has {sequences} (batch.sequences over shards x replicas);"
            " change one of them"
        )
    return micros


def _check_sum(key: str, slices: Sequence[int], tokens: int) -> None:
    if sum(slices) != tokens:
        raise PlanError(
            f"{key}: slices {list(slices)} add up to {sum(slices)} tokens, but batch.tokens ="
            f" {tokens}; the slices of a sequence must add up to its length"
        )
