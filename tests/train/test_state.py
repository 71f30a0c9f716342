"""Everything of a run goes through a checkpoint, from any layout to any other, every bit of it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from terashard.checkpoint.load import Checkpoint, find_latest
from terashard.config.schema import RunConfig
from terashard.errors import CheckpointError, ConfigError
from terashard.train.state import Progress, require_match
from terashard.train.stop import StopFlag
from terashard.train.trainer import Trainer
from terashard.train.worker import model_and_plan
from tests.train.runs import config_of, train

LAYOUTS = [{"stages": 2}, {"shards": 2}, {"replicas": 2}, {"stages": 2, "shards": 2}]


def contents(path: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(find_latest(path / "checkpoints"))
    return {name: checkpoint.read(name) for name in checkpoint.names()}


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "ASGD", "Adagrad", "NAdam"])
def test_what_is_restored_in_another_layout_is_what_was_saved(
    optimizer: str, tmp_path: Path
) -> None:
    words = ["--optimizer.name", optimizer, "--model.family", "gpt2", "--model.tied", "true"]
    if optimizer == "SGD":
        words += ["--optimizer.options", "{momentum = 0.9}"]
    config = config_of(tmp_path, *words, "--checkpoint.keep", "9")
    train(config, tmp_path / "run", stages=2, shards=2)
    before = contents(tmp_path / "run")
    assert any(name.startswith("optimizer/") for name in before)
    assert "model/head.output.weight" not in before  # tied: one weight, one name
    for layout in LAYOUTS:
        longer = replace(config, train=replace(config.train, steps=7))
        with pytest.raises(StopError):
            train(longer, tmp_path / "run", resume=True, prepare=save_and_stop, **layout)
        after = contents(tmp_path / "run")
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)


class StopError(Exception):
    """Ends a run before its first step."""


def save_and_stop(trainer: Trainer, flag: StopFlag) -> None:
    trainer.save()
    raise StopError


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Checkpoint, RunConfig]:
    config = config_of(tmp_path, "--train.steps", "1")
    train(config, tmp_path / "run")
    return Checkpoint.open(find_latest(tmp_path / "run" / "checkpoints")), config


def test_progress_is_what_was_saved(saved: tuple[Checkpoint, RunConfig]) -> None:
    checkpoint, _ = saved
    progress = Progress.of(checkpoint)
    assert (progress.step, progress.cursor.sample, progress.tokens) == (1, 4, 64)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model.hidden-size", "32"), r"of another model: embed.tokens.weight is \(\d+, 16\)"),
        (("--model.num-layers", "3"), r"layers.2.*is not there"),
        (("--model.num-layers", "1"), r"this run's has no layers.1"),
        (("--model.tied", "true"), r"this run's has no head.output.weight"),
        (("--optimizer.name", "SGD"), r"has the state of AdamW, and optimizer.name = 'SGD'"),
    ],
)
def test_another_model_or_optimizer_is_refused(
    words: tuple[str, ...], message: str, saved: tuple[Checkpoint, RunConfig], tmp_path: Path
) -> None:
    checkpoint, _ = saved
    other = config_of(tmp_path, *words)
    spec, _ = model_and_plan(other)
    with pytest.raises(ConfigError, match=message):
        require_match(checkpoint, spec, other)


def test_the_same_run_is_accepted(saved: tuple[Checkpoint, RunConfig]) -> None:
    checkpoint, config = saved
    require_match(checkpoint, model_and_plan(config)[0], config)


def test_a_checkpoint_that_no_run_wrote_is_refused(saved: tuple[Checkpoint, RunConfig]) -> None:
    checkpoint, _ = saved
    checkpoint._index = replace(checkpoint._index, extra={})
    with pytest.raises(CheckpointError, match="not written by `terashard train`"):
        Progress.of(checkpoint)


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    config = config_of(tmp_path, "--train.steps", "2")
    drawn: list[Tensor] = []

    def draw(trainer: Trainer, flag: StopFlag) -> None:
        trainer.callbacks.append(lambda trainer, record: drawn.append(torch.rand(3)))

    kept = torch.get_rng_state()
    torch.manual_seed(7)
    train(config, tmp_path / "run", prepare=draw)
    expected = torch.rand(3)
    torch.manual_seed(1)
    longer = config_of(tmp_path, "--train.steps", "3")
    train(longer, tmp_path / "run", resume=True, prepare=draw)
    torch.set_rng_state(kept)
    assert torch.equal(drawn[2], expected)
