"""A run is refused without torch, named, and handed to the launcher or the worker."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from terashard.cli.arguments import split
from terashard.cli.main import main
from terashard.config.load import load
from terashard.config.schema import RunConfig
from terashard.data.tokens import prepare
from terashard.train.stop import StopFlag

WORDS = ["train", "--preset", "tiny", "--data.train", "tokens"]

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


class Launcher(ModuleType):
    """Stands in for the module that starts processes."""

    def __init__(self) -> None:
        super().__init__("terashard.train.launch")
        self.calls: list[tuple[object, ...]] = []

    def launch(self, config: RunConfig, processes: int | None) -> int:
        self.calls.append(("launch", config, processes))
        return 7

    def work(self, config: RunConfig, flag: StopFlag) -> int:
        self.calls.append(("work", config))
        return 8

    def resume(self, directory: Path, overrides: Sequence[str], flag: StopFlag | None) -> int:
        self.calls.append(("resume", directory, tuple(overrides)))
        return 9


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    fake = Launcher()
    monkeypatch.setitem(sys.modules, "terashard.train.launch", fake)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "text.txt").write_text("token slices over sharded parameters\n" * 20)
    prepare([tmp_path / "text.txt"], tmp_path / "tokens")
    return fake


def test_train_hands_the_configuration_to_the_launcher(launcher: Launcher) -> None:
    words = [*WORDS, "--parallel.stages", "2", "-n", "2"]
    assert main(words) == 7
    [(name, config, processes)] = launcher.calls
    assert (name, processes) == ("launch", 2)
    assert isinstance(config, RunConfig)
    assert config.parallel.stages == 2
    assert config.run.directory.startswith("runs/tiny-2")


def test_the_run_directory_is_named_after_the_run_file(launcher: Launcher) -> None:
    Path("mine.toml").write_text('preset = "tiny"\n[data]\ntrain = "tokens"\n')
    assert main(["train", "mine.toml"]) == 7
    [(_, config, processes)] = launcher.calls
    assert isinstance(config, RunConfig)
    assert config.run.directory.startswith("runs/mine-")
    assert processes is None


def test_under_torchrun_the_process_becomes_the_worker(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(StopFlag, "listen", lambda self: None)
    assert main(WORDS) == 8
    assert launcher.calls == [("work", load(None, WORDS[3:], "tiny"))]


def test_a_callback_may_lie_in_the_current_folder_and_is_not_imported(launcher: Launcher) -> None:
    Path("mine_only_here.py").write_text("raise AssertionError('imported')")
    assert main([*WORDS, "--train.callbacks", "mine_only_here:f", "json.tool:main"]) == 7


def test_resume_hands_over_the_directory_and_the_options(launcher: Launcher) -> None:
    Path("run").mkdir()
    Path("run/config.toml").write_text('preset = "tiny"\n[data]\ntrain = "tokens"\n')
    assert main(["resume", "run", "--train.steps", "9"]) == 9
    assert launcher.calls == [("resume", Path("run"), ("--train.steps", "9"))]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--preset", "tiny"], "data.train is empty; name a folder that"),
        ([*WORDS, "--data.train", "nowhere"], "nowhere does not exist"),
        ([*WORDS, "--train.steps", "none"], "the run has no length; give train.steps"),
        ([*WORDS, "-n", "3"], "-n 3 does not match parallel: 1 replicas x 1 stages x 1 shards = 1"),
        ([*WORDS, "--run.directory", "tokens"], "the run directory tokens exists; go on with"),
        (
            [*WORDS, "--parallel.stages", "3"],
            "parallel.stages = 3 is more than the model",
        ),
        ([*WORDS, "--parallel.slices", "100", "100"], "slice"),
        ([*WORDS, "--model.vocab-size", "8"], "model.vocab_size is 8, but the data has"),
        ([*WORDS, "--optimizer.name", "adamw"], "'adamw' is no class of torch.optim; use one"),
        ([*WORDS, "--optimizer.options", "{beta = 1}"], "AdamW has no option 'beta'; its options"),
        (
            [*WORDS, "--optimizer.groups", "[{match = 'mlp.*', options = {}}]"],
            "no parameter matches 'mlp.*'",
        ),
        ([*WORDS, "--train.callbacks", "nowhere:f"], "no module nowhere in this folder"),
        ([*WORDS, "--train.callbacks", "os"], "'os' names no function; write module:function"),
        (["resume", "nowhere"], "there is no run directory nowhere"),
        (["resume", "tokens", "--train.stepps", "3"], "did you mean --train.steps?"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_torch(
    words: list[str], message: str, launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert launcher.calls == []


def test_options_with_a_dot_are_overrides_up_to_the_next_option() -> None:
    own, overrides = split(
        ["run.toml", "--a.b", "1", "-2", "--c.d=x", "-n", "4", "--e.f", "--preset=a.b"]
    )
    assert own == ["run.toml", "-n", "4", "--preset=a.b"]
    assert overrides == ["--a.b", "1", "-2", "--c.d=x", "--e.f"]


def test_a_resume_that_cannot_be_is_refused_before_torch_too(
    launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run").mkdir()
    Path("run/config.toml").write_text('preset = "tiny"\n[data]\ntrain = "tokens"\n')
    assert main(["resume", "run", "--optimizer.name", "adamw"]) == 2
    assert "'adamw' is no class of torch.optim; use one" in capsys.readouterr().err
    assert launcher.calls == []


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("verb", ["train", "resume"])
def test_a_launcher_that_left_half_its_variables_is_told(
    verb: str,
    name: str,
    launcher: Launcher,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It ended with KeyError 'LOCAL_RANK', or with int('')."""
    Path("run").mkdir()
    Path("run/config.toml").write_text('preset = "tiny"\n[data]\ntrain = "tokens"\n')
    for other, value in TORCHRUN.items():
        monkeypatch.setenv(other, value)
    monkeypatch.setenv(name, "")
    assert main(WORDS if verb == "train" else ["resume", "run"]) == 2
    assert f"but {name} is '', which is no number; start with" in capsys.readouterr().err
    if name.startswith("LOCAL"):
        monkeypatch.delenv(name)
        assert main(WORDS if verb == "train" else ["resume", "run"]) == 2
        assert f"but {name} is not set; start with" in capsys.readouterr().err
    assert launcher.calls == []
