import subprocess
import sys

import pytest

from terashard.cli.schedule import Check, Show, run
from terashard.errors import ConfigError, ScheduleError
from terashard.schedule.text import parse

RUN = """
[model]
num_layers = 4
tied = true
[batch]
sequences = 4
tokens = 16
[parallel]
stages = 2
shards = 2
micro_batches = 2
slices = 2
order = "fill_drain"
"""


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_show_draws_the_step_of_a_run(run_file, capsys):
    assert run(Show(file=run_file)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "fill_drain: 2 stages x 2 shards x 1 replica",
        "2 micro-batches of 1 sequence in 2 slices (8 + 8 tokens)",
        "",
        "step    0                        5",
        "rank 0  F0.0 F0.1 F1.0 F1.1 ·    ·    B1.1 B1.0 B0.1 B0.0",
        "rank 1  ·    F0.0 F0.1 F1.0 F1.1 B1.1 B1.0 B0.1 B0.0 ·",
        "",
        "10 steps; ranks compute 80% of the time.",
        "per step: rank 0 3 gathers, 4 reductions; rank 1 3 gathers, 4 reductions",
        "F is a forward cell, B a backward one, with micro-batch and slice; dots are idle.",
    ]


def test_show_tells_what_a_budget_costs(run_file, capsys):
    assert run(Show(file=run_file, overrides=("--parallel.residency", "3300000"))) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("per step")]
    assert told != ["per step: rank 0 3 gathers, 4 reductions; rank 1 3 gathers, 4 reductions"]
    assert "gathers" in told[0]


def test_options_win_over_the_run_file(run_file, capsys):
    changes = ("--parallel.slices", "4", "--parallel.order", "one_forward_one_backward")
    assert run(Show(file=run_file, overrides=changes)) == 0
    assert "in 4 slices (4 + 4 + 4 + 4 tokens)" in capsys.readouterr().out


def test_a_listed_schedule_is_one_that_check_reads(run_file, tmp_path, capsys):
    assert run(Show(file=run_file, list=True)) == 0
    listed = capsys.readouterr().out
    schedule = parse(listed)
    assert "A0:0@tie" in listed
    path = tmp_path / "schedule.txt"
    path.write_text(listed)
    assert run(Check(file=path)) == 0
    said = capsys.readouterr().out
    assert said == (
        f"{path} is right: {len(schedule)} actions on 2 ranks, 8 cells, buffered sends\n"
    )


def test_a_wrong_schedule_is_refused_with_its_file(run_file, tmp_path, capsys):
    assert run(Show(file=run_file, list=True)) == 0
    path = tmp_path / "schedule.txt"
    path.write_text(capsys.readouterr().out.replace(" F0.0.0 ", " "))
    with pytest.raises(ScheduleError, match=r"schedule\.txt: F0\.0\.0 is missing"):
        run(Check(file=path))


def test_blocking_sends_are_an_assumption_one_can_ask_for(run_file, tmp_path, capsys):
    changes = ("--parallel.order", "one_forward_one_backward")
    assert run(Show(file=run_file, list=True, overrides=changes)) == 0
    path = tmp_path / "schedule.txt"
    path.write_text(capsys.readouterr().out)
    assert run(Check(file=path)) == 0
    with pytest.raises(ScheduleError, match="with blocking sends this schedule never ends"):
        run(Check(file=path, sends="blocking"))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="schedule show needs a run file"):
        run(Show())
    with pytest.raises(ConfigError, match=r"cannot read the schedule .*none\.txt: No such file"):
        run(Check(file=tmp_path / "none.txt"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is not UTF-8 text"):
        run(Check(file=tmp_path / "binary"))


def test_the_verb_does_not_import_torch():
    code = "import sys, terashard.cli.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
