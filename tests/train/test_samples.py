"""Ranks tile the global batch; the held-out loss counts every sequence once."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from terashard.comm.mesh import Mesh
from terashard.config.schema import BatchConfig, DataConfig, RunConfig, TrainConfig
from terashard.data.batches import Cursor
from terashard.errors import ConfigError, DataError
from terashard.train.samples import Samples, rows_of
from tests.data.folders import counting_folder
from tests.helpers.threads import run_mesh

IGNORED = -100


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    counting_folder(tmp_path / "tokens", 101)
    return RunConfig(
        data=DataConfig(train=str(tmp_path / "tokens"), held_out=0.3),
        batch=BatchConfig(sequences=4, tokens=5),
    )


def test_rows_of_data_parallel_ranks_tile_the_global_batch(config: RunConfig) -> None:
    whole = Samples.of(config).draw(Cursor(4), range(4))
    for layout in ({"shards": 2}, {"replicas": 2}, {"replicas": 2, "shards": 2}):
        rows = run_mesh(lambda mesh: rows_of(config, mesh), **layout)
        parts = [Samples.of(config).draw(Cursor(4), own) for own in rows]
        assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
        assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)


def test_all_stages_of_one_data_parallel_rank_draw_the_same_rows(config: RunConfig) -> None:
    def work(mesh: Mesh) -> tuple[int, range]:
        return mesh.coordinates.shard, rows_of(config, mesh)

    assert run_mesh(work, stages=2, shards=2) == [
        (0, range(2)),
        (1, range(2, 4)),
        (0, range(2)),
        (1, range(2, 4)),
    ]


def test_training_never_sees_a_held_out_token(config: RunConfig) -> None:
    samples = Samples.of(config)
    drawn = [samples.draw(Cursor(first), range(4)).targets for first in range(0, 40, 4)]
    assert torch.cat(drawn).max() < 71
    assert samples.held_out is not None
    assert samples.held_out.first == 71


def test_every_held_out_sequence_counts_once_and_padding_is_ignored(config: RunConfig) -> None:
    samples = Samples.of(config)
    counted: list[int] = []
    index = 0
    while (drawn := samples.draw_held_out(index, range(4), IGNORED)) is not None:
        counted += [int(t) for t in drawn.targets.flatten() if t != IGNORED]
        index += 1
    assert counted == list(range(72, 97))  # 5 sequences of 5 targets out of 30 tokens
    assert index == 2
    last = samples.draw_held_out(1, range(4), IGNORED)
    assert last is not None
    assert (last.targets == IGNORED).sum() == 15
    assert (last.targets[0] != IGNORED).all()


def test_held_out_rows_of_ranks_tile_the_batch(config: RunConfig) -> None:
    samples = Samples.of(config)
    parts = [samples.draw_held_out(1, range(a, a + 2), IGNORED) for a in (0, 2)]
    whole = samples.draw_held_out(1, range(4), IGNORED)
    assert whole is not None
    assert torch.equal(torch.cat([p.targets for p in parts if p]), whole.targets)


def test_too_few_held_out_tokens_are_none_with_the_reason(config: RunConfig) -> None:
    config = replace(config, data=replace(config.data, held_out=0.05))
    samples = Samples.of(config)
    assert samples.held_out is None
    assert samples.draw_held_out(0, range(4), IGNORED) is None
    assert "data.held_out = 0.05 of 101 tokens are 5, no sequence of 5" in samples.nothing_held_out


def test_a_validation_folder_is_held_out_whole_and_training_loses_nothing(
    config: RunConfig, tmp_path: Path
) -> None:
    counting_folder(tmp_path / "other", 41, vocab_size=101)
    config = replace(config, data=replace(config.data, validation=str(tmp_path / "other")))
    samples = Samples.of(config)
    assert samples.training.num_samples == 20
    assert samples.held_out is not None
    assert samples.held_out.num_samples == 8


def test_a_validation_folder_of_another_vocabulary_is_refused(
    config: RunConfig, tmp_path: Path
) -> None:
    counting_folder(tmp_path / "other", 41)
    config = replace(config, data=replace(config.data, validation=str(tmp_path / "other")))
    with pytest.raises(DataError, match=r"vocabulary of 41 tokens, data.train one of 101; prepare"):
        Samples.of(config)


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ({"steps": 7}, 7),
        ({"tokens": 100}, 5),  # 20 tokens a step
        ({"tokens": 101}, 6),
        ({"epochs": 1.0}, 4),  # 14 sequences, 4 a step
        ({"epochs": 2.0}, 7),
        ({"epochs": 0.1}, 1),
    ],
)
def test_the_length_of_a_run_is_rounded_up_to_steps(
    config: RunConfig, length: dict[str, int], steps: int
) -> None:
    config = replace(config, train=TrainConfig(**length))  # type: ignore[arg-type]
    assert Samples.of(config).steps(config) == steps


def test_a_run_without_length_is_refused(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"no length; give train\.steps"):
        Samples.of(config).steps(config)
