"""Every step of a run is taken, and recorded, with the rate of that step."""

from pathlib import Path

import pytest

from terashard.train.rate import part_of_peak
from terashard.train.record import StepRecord
from terashard.train.stop import StopFlag
from terashard.train.trainer import Trainer
from tests.train.runs import config_of, stop_after, train


def test_a_step_is_taken_with_its_own_rate_before_and_after_a_resume(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    wanted = [1e-3 * part_of_peak(config.optimizer, step, 6) for step in range(6)]
    taken: list[float] = []

    def prepare(trainer: Trainer, flag: StopFlag) -> None:
        def note(trainer: Trainer, record: StepRecord) -> None:
            taken.extend({group["lr"] for group in trainer.optimizer.param_groups})

        trainer.callbacks.append(note)

    def begin(trainer: Trainer, flag: StopFlag) -> None:
        prepare(trainer, flag)
        stop_after(3)(trainer, flag)

    train(config, tmp_path / "run", prepare=begin)
    records = train(config, tmp_path / "run", resume=True, prepare=prepare)
    assert [record["lr"] for record in records] == pytest.approx(wanted, rel=1e-15)
    assert taken == pytest.approx(wanted, rel=1e-12)


def test_a_peak_of_zero_leaves_groups_with_a_rate_of_their_own_alone(tmp_path: Path) -> None:
    """The trainer divided by the peak to find the part, and took 0 for 0 / 0."""
    groups = '[{match = "embed.*", options = {lr = 0.5}}]'
    config = config_of(tmp_path, "--optimizer.lr", "0", "--optimizer.groups", groups)
    taken: list[float] = []

    def note(trainer: Trainer, record: StepRecord) -> None:
        taken.append(max(group["lr"] for group in trainer.optimizer.param_groups))

    records = train(
        config, tmp_path / "run", prepare=lambda trainer, _: trainer.callbacks.append(note)
    )
    assert taken == [0.5 * part_of_peak(config.optimizer, step, 6) for step in range(6)]
    assert {record["lr"] for record in records} == {0.0}
