"""The command answers at once, without torch, and turns every error into one message."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from terashard.cli import main as cli
from terashard.cli import version
from terashard.cli.main import VERBS, main
from terashard.config.load import presets
from terashard.errors import (
    CommunicationError,
    ConfigError,
    DataError,
    PlanError,
    RunError,
    TerashardError,
)

WITHOUT_TORCH = """
import sys
from terashard.cli.main import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules, "torch was imported"
if {"--help", "missing.toml", "--train.lr", "trian"} & set(sys.argv):
    assert "numpy" not in sys.modules, "numpy was imported"
sys.exit(code)
"""


def command(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env=environment,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["version"], 0),
        (["train", "--help"], 0),
        (["schedule", "show", "--help"], 0),
        (["demo", "--help"], 0),
        (["config", "show", "--preset", "demo"], 0),
        (["train", "missing.toml"], 2),
        (["train", "--preset", "tiny", "--train.lr", "3"], 2),
        (["train", "--preset", "tiny", "--data.train", "nowhere"], 2),
        (["trian"], 2),
    ],
)
def test_help_and_errors_answer_without_torch(words: list[str], code: int, tmp_path: Path) -> None:
    done = command(*words, folder=tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert lines == [] if code == 0 else len(lines) == 1 and lines[0].startswith("error: ")


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_every_command_explains_itself(verb: cli.Verb, capsys: pytest.CaptureFixture[str]) -> None:
    if find_spec(verb.module) is None:
        pytest.skip(f"{verb.module} is not there yet")
    assert main([*verb.name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: terashard {verb.name}")


def test_the_help_names_every_command_and_three_examples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        shown = capsys.readouterr().out
        assert all(f"  {verb.name} {verb.usage}".rstrip() in shown for verb in VERBS)
        assert sum(line.startswith("  terashard ") for line in shown.splitlines()) == 3
        assert max(map(len, shown.splitlines())) <= 80


def test_a_first_word_alone_explains_what_may_follow(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()[:2]) for line in lines] == ["schedule show", "schedule check"]


def test_the_help_of_train_shows_the_values_of_the_run_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text("[batch]\ntokens = 4321\n")
    assert main(["train", str(tmp_path / "run.toml"), "--help"]) == 0
    assert "(default: 4321)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian", "run.toml"], "there is no command 'trian'; did you mean train?"),
        (["prepare", "x"], "there is no command 'prepare'; did you mean data prepare?"),
        (["config", "shwo"], "there is no command 'config shwo'; did you mean config show?"),
        (["config"], "there is no command 'config'; did you mean config show?"),
        (["config", "show", "--dif"], "there is no option --dif; did you mean --diff?"),
        (["train", "x", "--proceses=3"], "no option --proceses; did you mean --processes?"),
        (["train", "x", "--steps", "3"], "no option --steps; did you mean --train.steps?"),
        (["train", "--steps", "3"], "no option --steps; did you mean --train.steps?"),
        (["train", "x", "-n", "two"], "-n/--processes is 'two'; it must be INT"),
        (["train", "x", "-n"], "Missing value for argument '-n/--processes'"),
        (["train", "x", "y"], "'y' is one word too many"),
        (["train"], "train needs a run file"),
        (["resume"], "RUN_DIR is missing; see terashard resume --help"),
        (["config", "show", "--batch.tokens", "x"], '--batch.tokens is the string "x"; it must'),
    ],
)
def test_a_wrong_command_line_names_the_nearest_right_one(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert message in said.err


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (ConfigError("no"), 2),
        (PlanError("no"), 2),
        (DataError("no"), 2),
        (RunError("no"), 1),
        (CommunicationError("no"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(3), 3),
    ],
)
def test_exit_codes_tell_refused_from_failed(
    raised: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(_: version.Version) -> int:
        raise raised

    monkeypatch.setattr(version, "run", run)
    assert main(["version"]) == code
    expected = "error: no\n" if isinstance(raised, TerashardError) else ""
    assert capsys.readouterr().err == expected


def test_the_traceback_is_shown_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERASHARD_TRACEBACK", "1")
    assert main(["train", "missing.toml"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.endswith("error: missing.toml does not exist; name a TOML file\n")


def test_a_bug_of_ours_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: version.Version) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(version, "run", run)
    with pytest.raises(ZeroDivisionError):
        main(["version"])


def test_config_show_prints_a_run_file_and_diff_only_what_was_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", "--preset", "tiny", "--train.steps", "7"]) == 0
    path = tmp_path / "whole.toml"
    path.write_text(capsys.readouterr().out)
    assert main(["config", "show", str(path), "--diff"]) == 0
    shown = capsys.readouterr().out
    assert "train.steps = 7" in shown
    assert f"{path}, line" in shown
    assert '"none" by default' in shown
    assert "run.seed" not in shown


@pytest.mark.parametrize("verb", ["train", "config show", "schedule show"])
def test_the_help_names_the_presets_there_are(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were typed by hand, in every command."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*verb.split(), "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"Named settings below the run file: {', '.join(presets())}." in shown
