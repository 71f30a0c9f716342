"""metrics.jsonl holds each step once, whatever interrupted the run."""

import json
from pathlib import Path

from terashard.train.record import Metrics, StepRecord, read_lines, read_records


def record(step: int, loss: float = 1.0) -> StepRecord:
    return StepRecord(
        step=step,
        loss=loss,
        gradient_norm=0.5,
        lr=0.1,
        tokens=8,
        tokens_total=8 * step,
        epoch=0,
        seconds=0.25,
        tokens_per_second=32.0,
        idle_share=0.5,
    )


def write(path: Path, *steps: int, after_step: int = 0) -> None:
    metrics = Metrics(path, after_step=after_step)
    for step in steps:
        metrics.write(record(step))
    metrics.close()


def test_records_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    write(tmp_path / "m", 1, 2)
    assert read_records(tmp_path / "m")[1] == json.loads(record(2).to_json())
    assert read_records(tmp_path / "m")[1]["held_out_loss"] is None


def test_a_resume_drops_the_steps_that_it_will_do_again(tmp_path: Path) -> None:
    write(tmp_path / "m", 1, 2, 3, 4, 5)
    write(tmp_path / "m", 4, 5, 6, after_step=3)
    assert [r["step"] for r in read_records(tmp_path / "m")] == [1, 2, 3, 4, 5, 6]


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    write(tmp_path / "m", 1, 2)
    with (tmp_path / "m").open("a") as file:
        file.write(record(3).to_json()[:30])
    assert len(read_lines(tmp_path / "m")) == 2
    write(tmp_path / "m", 3, after_step=2)
    assert [r["step"] for r in read_records(tmp_path / "m")] == [1, 2, 3]


def test_nan_and_infinity_are_json(tmp_path: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    for value in ("nan", "inf", "-inf"):
        line = record(1, loss=float(value)).to_json()
        assert json.loads(line, parse_constant=refuse)["loss"] == value


def test_every_record_is_on_the_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m")
    metrics.write(record(1))
    assert len(read_records(tmp_path / "m")) == 1
    metrics.close()


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert read_records(tmp_path / "none") == []
