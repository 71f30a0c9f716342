"""What the launcher settles before and after its workers, without any."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from terashard.config.load import load
from terashard.config.schema import RunConfig
from terashard.config.write import dump
from terashard.errors import CommunicationError, ConfigError, RunError
from terashard.plan.plan import plan_of
from terashard.train import launch, worker
from terashard.train.directory import RunDirectory
from terashard.train.stop import StopFlag
from terashard.train.worker import Place, _device
from tests.train.runs import config_of


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    found = RunDirectory(tmp_path / "run")
    found.create().close()
    return found


@pytest.mark.parametrize("state", ["stopped", "finished"])
def test_a_run_that_saved_before_it_stopped_is_a_success(
    state: str, directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    directory.write_status(state, 7)
    assert launch._after_signal(directory, 15) == 0
    assert capsys.readouterr().err == ""


def test_a_run_that_was_stopped_at_once_is_none_and_says_how_to_go_on(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    directory.write_status("running", 7)
    assert launch._after_signal(directory, 2) == 130
    assert capsys.readouterr().err == "stopped at once; no checkpoint was written yet\n"


def test_a_run_knows_its_data_wherever_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = launch._anywhere(config_of(Path()))
    assert config.data.train == str(tmp_path / "tokens")
    assert config.data.validation == ""


def test_a_resume_makes_the_paths_of_its_options_whole(
    directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative --data.train was kept, and meant another folder in the next resume."""
    monkeypatch.chdir(tmp_path)
    (directory.path / "config.toml").write_text(dump(config_of(Path())))
    monkeypatch.setattr(launch, "check_resume", lambda config, directory: plan_of(config, 2))
    monkeypatch.setattr(launch, "_launch", lambda *a, **k: 0)
    launch.resume(directory.path, ("--data.train", "./tokens", "--data.validation", "tokens"))
    asked = load(directory.request).data
    assert (asked.train, asked.validation) == (str(tmp_path / "tokens"), str(tmp_path / "tokens"))


def test_a_run_that_failed_says_after_which_step(
    directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said step 0: only the start had written a status."""

    def fails(config: RunConfig, processes: int) -> Callable[..., None]:
        def run(*words: str) -> None:
            record = {"step": 5, "loss": 1.0}
            directory.metrics.write_text(f"{json.dumps(record)}\n")
            raise ChildFailedError("worker", {0: ProcessFailure(0, 1, 1, error_file="")})

        return run

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(launch, "_elastic", fails)
    with pytest.raises(RunError):
        launch._launch(config_of(tmp_path), directory, 1, resume=False)
    assert directory.status()["state"] == "failed"
    assert directory.status()["step"] == 5


def test_under_torchrun_a_run_needs_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"under torchrun .* give --run.directory"):
        launch.work(config_of(tmp_path), StopFlag())


def test_a_rank_that_waits_in_vain_for_the_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"rank 0 did not make .*run within 0.1 s; is it on"):
        launch._wait_for(tmp_path / "run" / "lock", timeout=0.1)


def test_a_gpu_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(rank=1, local_rank=1, local_size=2, machine="here")
    for found in (0, 1):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda found=found: found)
        assert _device(config_of(tmp_path), place).type == "cpu"
        config = config_of(tmp_path, "--run.device", "cuda")
        with pytest.raises(ConfigError, match=f"torch sees {found} CUDA devices for 2 processes"):
            _device(config, place)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert _device(config_of(tmp_path), place) == torch.device("cuda", 1)


def test_under_torchrun_a_resume_holds_the_directory_as_a_new_run_does(
    directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a new run took the lock: two resumes could write into one directory."""
    became: list[str] = []
    monkeypatch.setattr(RunDirectory, "config", lambda self, overrides: config_of(tmp_path))
    monkeypatch.setattr(launch, "check_resume", lambda config, directory: None)
    monkeypatch.setattr(launch, "_become_rank", lambda *a, **k: became.append(os.environ["RANK"]))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with directory.hold():
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(ConfigError, match="is going on; wait for its end"):
            launch.resume(directory.path, (), StopFlag())
        monkeypatch.setenv("RANK", "1")  # rank 0 holds it for all
        launch.resume(directory.path, (), StopFlag())
    monkeypatch.setenv("RANK", "0")
    launch.resume(directory.path, (), StopFlag())
    assert became == ["1", "0"]


def test_peers_are_pinged_before_anything_waits_for_all_of_them(
    directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A world-wide exchange came first, with a time-out of minutes and no rank in its message."""

    def lost(*_: object) -> None:
        raise CommunicationError("rank 1 does not answer")

    def waits(*_: object) -> None:
        raise AssertionError("waited for all before the ping")

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(worker.Mesh, "of_processes", lambda **_: None)
    monkeypatch.setattr(worker, "_neighbours", waits)
    monkeypatch.setattr(worker, "ping", lost)
    with pytest.raises(CommunicationError, match="rank 1 does not answer"):
        worker.train(config_of(tmp_path), directory, StopFlag(), resume=False)
