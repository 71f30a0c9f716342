"""Wrong input: one sentence, exit code 2, no traceback, no worker, nothing changed on the disk."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from terashard.cli.main import main
from terashard.config.load import load
from terashard.config.write import dump
from tests.system.commands import SMALL, Command
from tests.train.runs import TEXT, stop_after, tokens, train

TRAIN = ["train", "run.toml", "--data.train", "tokens", "--run.directory", "run"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a run file and tokens. To start workers is an error."""

    def start(*_: object) -> None:
        raise AssertionError("workers would be started")

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("terashard.train.launch._elastic", start)
    monkeypatch.chdir(tmp_path)
    tokens(tmp_path)
    (tmp_path / "run.toml").write_text(SMALL)
    return tmp_path


@pytest.fixture
def stopped(folder: Path) -> Path:
    """A run of 6 steps that was stopped after 3."""
    run_of(folder, 3)
    return folder / "run"


def run_of(folder: Path, steps: int) -> None:
    words = ("--data.train", str(folder / "tokens"), "--train.steps", "6", "--parallel.stages", "1")
    config = load(folder / "run.toml", words)
    train(config, folder / "run", prepare=stop_after(steps))
    (folder / "run" / "config.toml").write_text(dump(config))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one sentence with which ``words`` are refused."""
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    (line,) = said.err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch.tokens", "700"], "a sequence of 700 tokens needs 701 with its last target, but"),
        (["--data.train", "empty"], "empty holds no prepared tokens; make them with"),
        (["--data.validation", "empty"], "empty holds no prepared tokens; make them with"),
        (["--parallel.stages", "3"], "parallel.stages = 3 is more than the model's 2 layers"),
        (["--parallel.slices", "10", "5"], "slices [10, 5] add up to 15 tokens, but batch.tokens"),
        (["--parallel.partition", "[[4, [8, 9]]]"], "slices [8, 9] add up to 17 tokens, but"),
        (["-n", "3"], "-n 3 does not match parallel: 1 replicas x 2 stages x 1 shards = 2"),
        (
            ["--optimizer.name", "Muon"],
            "optimizer.name = 'Muon' works on whole matrices, but",
        ),
        (["--optimizer.options", "{beta = 1}"], "AdamW has no option 'beta'; its options are lr"),
        (["--train.stepps", "3"], "did you mean --train.steps?"),
        (["--train.steps", "many"], "train.steps"),
        (["--run.directory", "tokens"], "the run directory tokens exists; go on with"),
        (["--run.directory", "run.toml/run"], "cannot write the run directory run.toml/run (Not a"),
        (["--train.precision", "fp8"], "fp8"),
        (
            ["--batch.sequences", "3", "--parallel.shards", "2"],
            "cannot be shared by 2 data",
        ),
    ],
)
def test_a_run_that_cannot_be_is_refused_and_leaves_nothing(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()
    before = sorted(folder.rglob("*"))
    assert message in refused(capsys, *TRAIN, *words)
    assert sorted(folder.rglob("*")) == before


def test_a_missing_run_file_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.toml does not exist; name a TOML file" in refused(
        capsys, "train", "nowhere.toml"
    )


def test_a_key_that_is_unknown_or_of_a_wrong_type_is_refused_with_its_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.toml").write_text("[train]\nstepps = 3\n")
    said = refused(capsys, "train", "bad.toml")
    assert said.startswith("bad.toml, line 2: train.stepps is unknown; did you mean train.steps?")
    Path("bad.toml").write_text('[train]\nsteps = "many"\n')
    assert refused(capsys, "train", "bad.toml").startswith("bad.toml, line 2: train.steps")


def test_an_empty_corpus_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("nothing.txt").write_text("")
    said = refused(capsys, "data", "prepare", "nothing.txt", "-o", "new")
    assert "the corpus is empty" in said
    assert not Path("new").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("locked").mkdir(mode=0o500)
    said = refused(capsys, *TRAIN, "--run.directory", "locked/run")
    assert "cannot write the run directory locked/run (Permission denied)" in said


def test_a_directory_that_is_no_run_is_not_resumed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there is no run directory nowhere" in refused(capsys, "resume", "nowhere")
    assert "tokens is no run directory: it has no config.toml" in refused(
        capsys, "resume", "tokens"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.hidden-size", "32"], "is of another model: embed.tokens.weight is ("),
        (["--model.num-layers", "1"], "is of another model: this run's has no layers.1"),
        (["--optimizer.name", "SGD"], "has the state of AdamW, and optimizer.name = 'SGD'; go on"),
        (["--train.steps", "3"], "the run has done 3 of 3 steps and is complete; give a greater"),
        (["--parallel.stages", "3"], "parallel.stages = 3 is more than the model's 2 layers"),
        (["--run.directory", "other"], "a run goes on where it is: leave --run.directory out"),
        (["--data.train", "nowhere"], "nowhere does not exist"),
    ],
)
def test_a_resume_that_cannot_be_is_refused_and_changes_nothing(
    words: list[str], message: str, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.read_bytes() for p in stopped.rglob("*") if p.is_file()}
    assert message in refused(capsys, "resume", "run", *words)
    after = {p: p.read_bytes() for p in stopped.rglob("*") if p.is_file()}
    assert after == before


def test_a_finished_run_is_not_resumed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(folder, 6)
    assert "has done 6 of 6 steps and is complete; give" in refused(capsys, "resume", "run")


def test_a_run_without_a_complete_checkpoint_is_not_resumed(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stopped / "checkpoints" / "step-00000003" / "index.json").unlink()
    said = refused(capsys, "resume", "run")
    assert "run cannot be resumed: run/checkpoints holds no complete checkpoint" in said
    shutil.rmtree(stopped / "checkpoints")
    assert "holds no complete checkpoint" in refused(capsys, "resume", "run")


@pytest.mark.processes
def test_a_token_outside_the_vocabulary_is_one_sentence_though_a_worker_finds_it(
    tmp_path: Path,
) -> None:
    damaged = tokens(tmp_path)
    info = json.loads((damaged / "tokens.json").read_text())
    ids = np.frombuffer(TEXT.encode(), dtype="u1").astype("<u2")
    ids[::10] = 9999
    ids.tofile(damaged / "tokens.bin")
    (damaged / "tokens.json").write_text(json.dumps(info | {"dtype": "uint16"}))
    (tmp_path / "run.toml").write_text(SMALL)
    with Command(tmp_path, *TRAIN) as command:
        assert command.wait(60) == 2
        assert command.err() == (
            f"error: {tmp_path}/tokens holds token id 9999, outside its vocabulary 0 to 255; the"
            " folder is damaged: prepare the data again\n"
        )
        assert command.survivors(within=1) == []
