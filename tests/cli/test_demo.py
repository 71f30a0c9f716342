"""The demo: what it prints, and (marked e2e) that it learns what it promises."""

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from terashard.cli import demo
from terashard.cli.main import main
from terashard.config.load import load
from terashard.data.baseline import Baseline


def test_the_preset_trains_two_stages_on_slices_and_downloads_nothing() -> None:
    config = load(None, (), "demo")
    assert (config.parallel.stages, config.parallel.slices) == (2, (4,))
    assert config.data.train == ""


@pytest.mark.parametrize("dotted", ["data.train", "data.validation", "run.directory"])
def test_what_the_demo_decides_itself_is_refused_and_not_dropped(
    dotted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "demo"
    assert main(["demo", "--directory", str(root), f"--{dotted}", "mine"]) == 2
    assert f"--{dotted} cannot be given; name a folder for both" in capsys.readouterr().err
    assert not root.exists()


@pytest.mark.parametrize(
    ("length", "option"),
    [
        (("--train.steps", "7"), "--train.steps 14"),
        (("--train.tokens", "3000000"), "--train.tokens 6000000"),
        (("--train.epochs", "0.75"), "--train.epochs 1.5"),
    ],
)
def test_twice_as_long_is_twice_what_was_asked_for(length: tuple[str, ...], option: str) -> None:
    """It was 800 steps, whatever had been run."""
    assert demo._twice(load(None, length, "demo").train) == option


def test_a_torn_last_record_does_not_hide_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo parsed the file by itself, and ended with a JSONDecodeError."""
    config = load(None, ("--run.directory", str(tmp_path)), "demo")
    whole = '{"step": 3, "loss": 2.5, "held_out_loss": null}'
    (tmp_path / "metrics.jsonl").write_text(f"{whole}\n{whole[:20]}")
    tables = Baseline(unigram=3.0, bigram=2.0)
    assert demo._show_result(Console(), config, tables) == 0
    assert "stopped after step 3" in capsys.readouterr().out


def test_a_loss_that_is_no_number_is_a_result_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended with TypeError: '<' between str and float."""
    config = load(None, ("--run.directory", str(tmp_path)), "demo")
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": "nan", "held_out_loss": "nan"}\n')
    assert demo._show_result(Console(), config, Baseline(unigram=3.0, bigram=2.0)) == 0
    assert "held-out loss nan nats per byte, NOT below the bigram table" in capsys.readouterr().out


@pytest.mark.processes
def test_the_demo_shows_tables_plan_curve_and_what_to_try_next(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--train.steps", "4", "--train.evaluate-batches", "1")
    assert main(["demo", "--directory", str(tmp_path / "demo"), *options]) == 0
    out = capfd.readouterr().out
    for said in (
        "bigram table",
        "2 stages x 1 shard x 1 replica",
        "rank 1  ·    F0.0",
        "step 4/4  loss",
        "held-out loss",
        f"run directory {tmp_path}/demo/run",
        "terashard resume",
    ):
        assert said in out
    assert "┤" in out
    assert (tmp_path / "demo/run/checkpoints/latest").exists()


@pytest.mark.processes
@pytest.mark.e2e
def test_the_demo_beats_the_bigram_table_and_2_3_nats_per_byte(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--directory", str(tmp_path / "demo")]) == 0
    found = re.search(r"(\d\.\d+)  knowing the byte before", capfd.readouterr().out)
    assert found is not None
    last = json.loads((tmp_path / "demo/run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["held_out_loss"] < min(2.3, float(found[1]))
