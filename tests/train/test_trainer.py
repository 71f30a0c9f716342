"""The loop: lengths, clipping, numbers that are not finite, evaluation, callbacks, stopping."""

import logging
import math
from pathlib import Path

import pytest

from terashard.errors import ConfigError, RunError
from terashard.train.record import StepRecord, read_records
from terashard.train.stop import StopFlag
from terashard.train.trainer import Trainer
from tests.train.runs import after_step, config_of, numbers, rows_of, stop_after, train

CALLS: list[tuple[int, int]] = []


def poison(trainer: Trainer, flag: StopFlag) -> None:
    """For ``prepare``: the last rank's first parameter is NaN in step 3, and in no other."""
    if trainer.pipeline.mesh.rank != trainer.pipeline.mesh.world.size - 1:
        return
    rows = next(iter(rows_of(trainer).values()))
    kept = rows.clone()

    def act(trainer: Trainer, record: StepRecord) -> None:
        if record.step == 2:
            kept.copy_(rows)
            rows.fill_(math.nan)
        elif record.step == 3:
            rows.copy_(kept)

    trainer.callbacks.append(act)


def test_losses_fall_and_every_step_is_recorded(tmp_path: Path) -> None:
    config = config_of(tmp_path, "--train.steps", "40", "--optimizer.lr", "0.03")
    records = train(config, tmp_path / "run", stages=2)
    assert [record["step"] for record in records] == list(range(1, 41))
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    assert records[-1]["tokens_total"] == 40 * 64
    assert [r["held_out_loss"] is None for r in records] == [True] * 39 + [False]
    assert all(0 <= record["idle_share"] <= 1 for record in records)


@pytest.mark.parametrize("length", [("tokens", "130"), ("epochs", "0.3"), ("steps", "3")])
def test_a_run_has_the_length_in_steps_tokens_or_epochs(
    length: tuple[str, str], tmp_path: Path
) -> None:
    config = config_of(tmp_path, f"--train.{length[0]}", length[1])
    records = train(config, tmp_path / "run")
    assert len(records) == {"tokens": 3, "steps": 3, "epochs": 3}[length[0]]


def test_layouts_agree_on_losses_and_norms(tmp_path: Path) -> None:
    config = config_of(tmp_path, "--train.precision", "fp64", "--train.evaluate-every", "3")
    one = train(config, tmp_path / "one")
    for layout in ({"stages": 2}, {"shards": 2}, {"replicas": 2, "stages": 2}):
        found = train(config, tmp_path / "-".join(layout), **layout)
        for name in ("loss", "gradient_norm", "held_out_loss"):
            expected = [r[name] for r in one if r[name] is not None]
            assert [r[name] for r in found if r[name] is not None] == pytest.approx(
                expected, rel=1e-10
            )


def test_the_held_out_loss_changes_nothing(tmp_path: Path) -> None:
    often = train(config_of(tmp_path, "--train.evaluate-every", "1"), tmp_path / "often")
    rarely = train(config_of(tmp_path), tmp_path / "rarely")
    assert [r["loss"] for r in often] == [r["loss"] for r in rarely]


def test_the_held_out_loss_is_a_mean_over_tokens_however_they_are_batched(tmp_path: Path) -> None:
    """Three sequences in batches of one, two (the last with one alone) and four (padded)."""
    losses = []
    for sequences in ("1", "2", "4"):
        words = ("--optimizer.lr", "0", "--train.steps", "1", "--batch.sequences", sequences)
        (record,) = train(config_of(tmp_path, *words), tmp_path / sequences)
        losses.append(record["held_out_loss"])
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-6)


def test_the_held_out_loss_is_cross_entropy_whatever_is_trained_on(tmp_path: Path) -> None:
    """It had label smoothing and z-loss in it, and was called nats per token all the same."""
    words = ("--optimizer.lr", "0", "--train.steps", "1")
    (plain,) = train(config_of(tmp_path, *words), tmp_path / "plain")
    more = ("--loss.label-smoothing", "0.3", "--loss.z-loss", "0.1")
    (mixed,) = train(config_of(tmp_path, *words, *more), tmp_path / "mixed")
    assert mixed["held_out_loss"] == plain["held_out_loss"]
    assert mixed["loss"] > plain["loss"] + 0.5


def test_nothing_held_out_is_said_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "terashard"):
        records = train(config_of(tmp_path, "--data.held-out", "0"), tmp_path / "run")
    assert records[-1]["held_out_loss"] is None
    assert "no evaluation: nothing is held out (data.held_out = 0 of" in caplog.text


def test_the_log_says_what_was_evaluated_and_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "terashard"):
        records = train(config_of(tmp_path, "--checkpoint.every", "3"), tmp_path / "run")
    assert f"step 6: held-out loss {records[-1]['held_out_loss']:.4f}" in caplog.text
    for step in (3, 6):
        assert f"saved {tmp_path}/run/checkpoints/step-0000000{step} in" in caplog.text
    assert "finished 6 steps in" in caplog.text


def test_gradients_are_clipped_to_the_limit_and_recorded_before(tmp_path: Path) -> None:
    """SGD of rate 1: an update is as long as the clipped gradient."""
    words = ("--optimizer.name", "SGD", "--optimizer.lr", "1", "--optimizer.schedule", "constant")
    config = config_of(
        tmp_path, *words, "--optimizer.warmup", "0", "--optimizer.weight-decay", "0",
        "--optimizer.clip-norm", "0.01", "--train.steps", "1", "--train.precision", "fp64",
    )  # fmt: skip
    moved: list[float] = []

    def prepare(trainer: Trainer, flag: StopFlag) -> None:
        before = {name: rows.clone() for name, rows in rows_of(trainer).items()}

        def measure(trainer: Trainer, record: object) -> None:
            squares = [(rows - before[n]).square().sum() for n, rows in rows_of(trainer).items()]
            moved.append(math.sqrt(sum(map(float, squares))))

        trainer.callbacks.append(measure)

    (record,) = train(config, tmp_path / "run", prepare=prepare)
    assert record["gradient_norm"] > 0.1
    assert moved == [pytest.approx(0.01, rel=1e-4)]


def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path: Path) -> None:
    records = train(config_of(tmp_path), tmp_path / "run", stages=2, prepare=poison)
    assert [r["skipped"] for r in records] == [False, False, True, False, False, False]
    assert [r["non_finite"] for r in records] == [0, 0, 1, 1, 1, 1]
    assert records[2]["gradient_norm"] == "nan"
    assert all(isinstance(r["loss"], float) for r in records[3:])


def test_under_count_the_update_is_made_all_the_same(tmp_path: Path) -> None:
    config = config_of(tmp_path, "--train.non-finite", "count", "--checkpoint.every", "0")
    records = train(config, tmp_path / "run", stages=2, prepare=poison)
    assert [r["skipped"] for r in records] == [False] * 6
    assert records[-1]["non_finite"] == 4  # the other parameters were updated with NaN


def test_under_stop_the_run_saves_and_ends_with_an_error(tmp_path: Path) -> None:
    config = config_of(tmp_path, "--train.non-finite", "stop")
    with pytest.raises(RunError, match=r"step 3: loss .*nan: stopped, as train.non_finite says"):
        train(config, tmp_path / "run", stages=2, prepare=poison)
    assert [r["step"] for r in read_records(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir()


def test_one_rank_that_is_asked_stops_all_after_the_same_step(tmp_path: Path) -> None:
    """The flag travels in the reduction of the next step."""

    def prepare(trainer: Trainer, flag: StopFlag) -> None:
        if trainer.pipeline.mesh.rank == 2:
            after_step(3, lambda trainer: setattr(flag, "asked", True))(trainer, flag)

    records = train(config_of(tmp_path), tmp_path / "run", stages=2, shards=2, prepare=prepare)
    assert len(records) == 4
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()


def test_a_run_asked_to_stop_before_it_begins_does_one_step_and_saves(tmp_path: Path) -> None:
    def prepare(trainer: Trainer, flag: StopFlag) -> None:
        flag.asked = True

    assert len(train(config_of(tmp_path), tmp_path / "run", stages=2, prepare=prepare)) == 1
    assert len(train(config_of(tmp_path), tmp_path / "run", stages=2, resume=True)) == 6


def test_a_complete_run_is_not_resumed(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    train(config, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"has done 6 of 6 steps and is complete; give a greater"):
        train(config, tmp_path / "run", resume=True)


def test_a_complete_run_goes_on_with_more_steps(tmp_path: Path) -> None:
    train(config_of(tmp_path), tmp_path / "run")
    longer = train(config_of(tmp_path, "--train.steps", "8"), tmp_path / "run", resume=True)
    assert len(longer) == 8


def test_a_callback_may_save_and_the_step_is_not_saved_twice(tmp_path: Path) -> None:
    config = config_of(tmp_path, "--checkpoint.every", "2", "--checkpoint.keep", "9")
    train(config, tmp_path / "run", stages=2, prepare=after_step(4, Trainer.save))
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert names == ["step-00000002", "step-00000004", "step-00000006"]


def called(trainer: Trainer, record: object) -> None:
    CALLS.append((trainer.pipeline.mesh.rank, trainer.progress.step))


def fails(trainer: Trainer, record: object) -> None:
    if (trainer.pipeline.mesh.rank, trainer.progress.step) == (1, 2):
        raise KeyError("lost")


def test_callbacks_are_called_on_every_rank_after_every_step(tmp_path: Path) -> None:
    CALLS.clear()
    config = config_of(tmp_path, "--train.callbacks", f"{__name__}:called", "--train.steps", "3")
    train(config, tmp_path / "run", stages=2)
    assert sorted(CALLS) == [(rank, step) for rank in (0, 1) for step in (1, 2, 3)]


def test_an_exception_in_a_callback_names_rank_callback_and_step(tmp_path: Path) -> None:
    config = config_of(tmp_path, "--train.callbacks", f"{__name__}:fails")
    match = r"rank 1 \(replica 0, stage 1, shard 0\): callback .*:fails failed after step 2: KeyErr"
    with pytest.raises(RunError, match=match):
        train(config, tmp_path / "run", stages=2)


@pytest.mark.parametrize("name", ["no_module_of_this_name:f", "math", "math:nothing", "math:pi"])
def test_a_callback_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"write module:function"):
        train(config_of(tmp_path, "--train.callbacks", name), tmp_path / "run")


def test_records_do_not_depend_on_who_watches(tmp_path: Path) -> None:
    config = config_of(tmp_path, "--train.steps", "4")
    one = train(config, tmp_path / "one", prepare=stop_after(4))
    assert numbers(one) == numbers(train(config, tmp_path / "two"))
