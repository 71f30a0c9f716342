"""Every step of a run is taken, and recorded, with the rate of that step."""

from pathlib import Path

import pytest

from terashard.train.rate import learning_rate
from terashard.train.record import StepRecord
from terashard.train.stop import StopFlag
from terashard.train.trainer import Trainer
from tests.train.runs import config_of, stop_after, train


def test_a_step_is_taken_with_its_own_rate_before_and_after_a_resume(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    wanted = [learning_rate(config.optimizer, step, 6) for step in range(6)]
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
