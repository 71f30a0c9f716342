"""A run that is stopped and resumed is the run that was never interrupted.

In the same layout bit for bit, across an epoch boundary; in another layout to rounding. The
unclipped gradient norms are compared too: Adam hides a wrong scale of the gradient.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from terashard.checkpoint.load import Checkpoint, find_latest
from tests.train.runs import config_of, numbers, stop_after, train

OPTIMIZERS = {
    "adamw": "",
    "sgd": "--optimizer.name SGD --optimizer.lr 0.1 --optimizer.options {momentum=0.9}",
}
MODELS = {"llama": "", "gpt2, tied": "--model.family gpt2 --model.tied true"}
LENGTH = "--train.epochs 1.2 --train.evaluate-every 10"


def words_of(optimizer: str, model: str) -> list[str]:
    return " ".join((OPTIMIZERS[optimizer], MODELS[model], LENGTH)).split()


@pytest.mark.parametrize(
    ("optimizer", "model", "layout"),
    [
        ("adamw", "llama", {"stages": 2}),
        ("sgd", "gpt2, tied", {"stages": 2}),
        ("adamw", "gpt2, tied", {"shards": 2}),
        ("sgd", "llama", {"shards": 2}),
    ],
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(
    layout: dict[str, int], optimizer: str, model: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, *words_of(optimizer, model))
    whole = train(config, tmp_path / "whole", **layout)
    epochs = [record["epoch"] for record in whole]
    assert sorted(set(epochs)) == [0, 1]
    for stop in (3, epochs.index(1)):  # early, and right at the boundary
        path = tmp_path / f"cut-{stop}"
        first = train(config, path, prepare=stop_after(stop), **layout)
        assert [record["step"] for record in first] == list(range(1, stop + 1))
        found = train(config, path, resume=True, **layout)
        assert numbers(found) == numbers(whole)  # each step once, and every bit of it


@pytest.mark.parametrize(("optimizer", "model"), [("adamw", "llama"), ("sgd", "gpt2, tied")])
def test_a_run_goes_on_in_any_other_layout(optimizer: str, model: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, *words_of(optimizer, model))
    whole = train(config, tmp_path / "whole", stages=2)
    for layout in ({"shards": 2}, {}, {"replicas": 2}):
        path = tmp_path / "-".join(("cut", *layout))
        train(config, path, prepare=stop_after(5), stages=2)
        assert_close(train(config, path, resume=True, **layout), whole)


def assert_close(found: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    assert [record["step"] for record in found] == [record["step"] for record in whole]
    for name in ("loss", "gradient_norm"):
        losses = [record[name] for record in found]
        assert losses == pytest.approx([record[name] for record in whole], rel=1e-5)


def test_a_run_survives_any_number_of_moves(tmp_path: Path) -> None:
    config = config_of(tmp_path, *words_of("adamw", "gpt2, tied"))
    whole = train(config, tmp_path / "whole")
    path = tmp_path / "moved"
    train(config, path, prepare=stop_after(2), stages=2)
    train(config, path, resume=True, prepare=stop_after(5), shards=2)
    train(config, path, resume=True, prepare=stop_after(7), stages=2, shards=2)
    assert_close(train(config, path, resume=True), whole)


def test_a_checkpoint_says_all_that_a_run_needs(tmp_path: Path) -> None:
    config = config_of(tmp_path, "--checkpoint.every", "2", "--checkpoint.keep", "9")
    train(config, tmp_path / "run", stages=2)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["latest", "step-00000002", "step-00000004", "step-00000006"]
    checkpoint = Checkpoint.open(find_latest(tmp_path / "run" / "checkpoints"))
    assert checkpoint.step == 6
    assert checkpoint.extra["cursor"] == {"sample": 24}
    assert checkpoint.extra["tokens"] == 6 * 4 * 16
    plan = checkpoint.extra["plan"]
    assert isinstance(plan, dict)
    assert plan["stages"] == 2
    timeline = json.loads((tmp_path / "run" / "timeline.json").read_text())
    assert (timeline["step"], len(timeline["ranks"])) == (6, 2)
