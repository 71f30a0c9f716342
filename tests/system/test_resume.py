"""A run that is stopped and resumed is the run that was never interrupted.

In the same layout bit for bit, across an epoch boundary; in another layout to rounding. The
unclipped gradient norms are compared too: Adam hides a wrong scale of the gradient.
"""

import json
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terashard.checkpoint.load import Checkpoint, find_latest
from terashard.config.load import load
from terashard.train.record import read_records
from tests.system.commands import SMALL, Command, steps_of
from tests.train.runs import config_of, numbers, stop_after, tokens, train

OPTIMIZERS = {
    "adamw": "",
    "sgd": "--optimizer.name SGD --optimizer.lr 0.1 --optimizer.options {momentum=0.9}",
}
MODELS = {"llama": "", "gpt2, tied": "--model.family gpt2 --model.tied true"}
CALLBACKS = '''
import time
from pathlib import Path


def slow(trainer, record):
    time.sleep(0.1)


def sleeps(trainer, record):
    if record.step == 7:
        time.sleep(600)


def slow_evaluation(trainer, record):
    if record.step == 4:
        slowly(trainer.pipeline, "evaluate")


def slow_save(trainer, record):
    if record.step == 4:
        slowly(trainer, "save")


def slowly(owner, name):
    """Let the next call of a method say that it has begun, and take two seconds."""
    act = getattr(owner, name)

    def call(*given, **named):
        setattr(owner, name, act)
        Path("now").touch()
        time.sleep(2)
        return act(*given, **named)

    setattr(owner, name, call)
'''
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


def start(folder: Path, *words: str, **options: Any) -> Command:
    """A real run of two stages that would take a while; runs go into ``folder/run``."""
    (folder / "run.toml").write_text(SMALL)
    (folder / "called.py").write_text(CALLBACKS)
    tokens(folder)
    given = ("--data.train", "tokens", "--run.directory", "run", *words)
    return Command(folder, "train", "run.toml", *given, **options)


def stopped_step(folder: Path, said: str) -> int:
    """The step that a stopped run has saved and told of."""
    found = re.search(r"^stopped after step (\d+) of \d+ and saved: loss \S+$", said, re.MULTILINE)
    assert found, said
    step = int(found[1])
    assert Checkpoint.open(find_latest(folder / "run" / "checkpoints")).step == step
    assert steps_of(folder / "run") == list(range(1, step + 1))
    assert "go on with: terashard resume run" in said
    return step


@pytest.mark.processes
def test_ctrl_c_saves_on_every_rank_and_the_run_goes_on_as_if_nothing_had_been(
    tmp_path: Path,
) -> None:
    with start(tmp_path, "--train.callbacks", "called:slow") as command:
        command.until_step(tmp_path / "run", 7)
        command.press_ctrl_c()
        assert command.wait() == 0, command.err()
        assert command.survivors(within=1) == []
        assert "stopping after this step; once more stops at once" in command.out()
        step = stopped_step(tmp_path, command.out())
        assert command.err() == ""
    for rank in (0, 1):
        log = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
        for said in (f"rank {rank} (replica 0, stage {rank}, shard 0) of Plan(", "'torch': '"):
            assert said in log
        assert f"saved run/checkpoints/step-{step:08d} in" in log
    last = str(step + 3)
    with Command(tmp_path, "resume", "run", "--train.steps", last, "--train.callbacks") as command:
        assert command.wait(60) == 0, command.err()
        assert f"finished steps {step + 1} to {last} in" in command.out()
        assert "run directory: run" in command.out()
    config = load(tmp_path / "run" / "config.toml", ("--train.steps", last))
    found = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in found] == list(range(1, step + 4))
    longer = load(tmp_path / "run" / "config.toml", ("--train.steps", "100000"))
    whole = train(longer, tmp_path / "whole", prepare=stop_after(step), stages=2)
    whole = train(config, tmp_path / "whole", resume=True, stages=2)
    assert_close(found, whole)


@pytest.mark.processes
def test_a_second_ctrl_c_stops_at_once_with_the_last_checkpoint_intact(tmp_path: Path) -> None:
    with start(tmp_path, "--train.callbacks", "called:sleeps") as command:
        command.until_step(tmp_path / "run", 7)
        command.press_ctrl_c()
        command.until(lambda: "once more stops at once" in command.out())
        time.sleep(2.0)
        command.press_ctrl_c()
        began = time.monotonic()
        assert command.wait() == 130
        assert time.monotonic() - began < 5
        assert command.survivors(within=1) == []
        assert command.err() == (
            "stopped at once; go on from step-00000005 with: terashard resume run\n"
        )
    assert Checkpoint.open(find_latest(tmp_path / "run" / "checkpoints")).step == 5


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("seconds", [0.0, 0.5, 2.0])
def test_a_run_that_is_told_to_stop_while_it_starts_does_one_step_and_saves(
    seconds: float, tmp_path: Path
) -> None:
    with start(tmp_path) as command:
        command.until(lambda: command.workers())
        time.sleep(seconds)
        command.send(signal.SIGTERM)
        assert command.wait() == 0, command.err()
        assert stopped_step(tmp_path, command.out()) == 1


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("callback", ["slow_evaluation", "slow_save"])
def test_a_run_that_is_told_to_stop_while_it_evaluates_or_saves_ends_that_first(
    callback: str, tmp_path: Path
) -> None:
    words = ("--train.callbacks", f"called:{callback}", "--train.evaluate-every", "5")
    with start(tmp_path, *words) as command:
        command.until(lambda: (tmp_path / "now").exists())
        command.send(signal.SIGTERM)
        assert command.wait() == 0, command.err()
        assert stopped_step(tmp_path, command.out()) == 6


@pytest.mark.slow
@pytest.mark.processes
def test_one_rank_that_is_told_stops_all(tmp_path: Path) -> None:
    with start(tmp_path) as command:
        command.until_step(tmp_path / "run", 3)
        command.workers()[1].send_signal(signal.SIGTERM)
        assert command.wait() == 0, command.err()
        stopped_step(tmp_path, command.out())


@pytest.mark.slow
@pytest.mark.processes
def test_under_torchrun_all_is_the_same(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m")
    launcher = (*torchrun, "terashard")
    with start(tmp_path, launcher=launcher) as command:
        command.until_step(tmp_path / "run", 7)
        command.send(signal.SIGTERM)
        command.wait()  # torchrun itself fails when it is signalled
        step = stopped_step(tmp_path, command.out())
    last = str(step + 2)
    with Command(tmp_path, "resume", "run", "--train.steps", last, launcher=launcher) as command:
        assert command.wait(60) == 0, command.err()
        assert f"to {last} in" in command.out()
    assert steps_of(tmp_path / "run") == list(range(1, step + 3))


@pytest.mark.slow
@pytest.mark.processes
def test_saving_has_no_longer_than_the_shutdown_time_out(tmp_path: Path) -> None:
    words = ("--train.callbacks", "called:sleeps", "--run.shutdown-timeout", "3")
    with start(tmp_path, *words) as command:
        command.until_step(tmp_path / "run", 7)
        command.send(signal.SIGTERM)
        began = time.monotonic()
        assert command.wait() == 128 + signal.SIGTERM
        assert 2 < time.monotonic() - began < 15
        assert command.survivors(within=1) == []


@pytest.mark.slow
@pytest.mark.processes
def test_a_real_run_goes_on_in_another_layout(tmp_path: Path) -> None:
    with start(tmp_path, "--train.steps", "4") as command:
        assert command.wait(60) == 0, command.err()
    words = ("--train.steps", "7", "--parallel.stages", "1", "--parallel.shards", "2")
    with Command(tmp_path, "resume", "run", *words) as command:
        assert command.wait(60) == 0, command.err()
    config = load(tmp_path / "run" / "config.toml")
    assert (config.parallel.stages, config.parallel.shards) == (1, 2)
    found = read_records(tmp_path / "run" / "metrics.jsonl")
    train(replace(config, train=replace(config.train, steps=4)), tmp_path / "whole", stages=2)
    assert_close(found, train(config, tmp_path / "whole", resume=True, shards=2))
