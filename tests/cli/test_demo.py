"""The demo: what it prints, and (marked e2e) that it learns what it promises."""

import json
import re
from pathlib import Path

import pytest

from terashard.cli.main import main
from terashard.config.load import load


def test_the_preset_trains_two_stages_on_slices_and_downloads_nothing() -> None:
    config = load(None, (), "demo")
    assert (config.parallel.stages, config.parallel.slices) == (2, (4,))
    assert config.data.train == ""


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
