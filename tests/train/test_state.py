"""Everything of a run goes through a checkpoint, from any layout to any other, every bit of it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from terashard.checkpoint.load import Checkpoint, find_latest
from terashard.config.schema import RunConfig
from terashard.errors import CheckpointError, ConfigError
from terashard.train import state, worker
from terashard.train.preflight import model_and_plan
from terashard.train.samples import Samples
from terashard.train.state import (
    Progress,
    require_match,
    require_same_samples,
    restore_random_state,
    scalar_device,
)
from terashard.train.stop import StopFlag
from terashard.train.trainer import Trainer
from tests.data.folders import text_folder
from tests.train.runs import TEXT, config_of, train

LAYOUTS = [{"stages": 2}, {"shards": 2}, {"replicas": 2}, {"stages": 2, "shards": 2}]


def contents(path: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(find_latest(path / "checkpoints"))
    return {name: checkpoint.read(name) for name in checkpoint.names()}


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "ASGD", "Adagrad", "NAdam"])
def test_what_is_restored_in_another_layout_is_what_was_saved(
    optimizer: str, tmp_path: Path
) -> None:
    words = ["--optimizer.name", optimizer, "--model.family", "gpt2", "--model.tied", "true"]
    if optimizer == "SGD":
        words += ["--optimizer.options", "{momentum = 0.9}"]
    config = config_of(tmp_path, *words, "--checkpoint.keep", "9")
    train(config, tmp_path / "run", stages=2, shards=2)
    before = contents(tmp_path / "run")
    assert any(name.startswith("optimizer/") for name in before)
    assert "model/head.output.weight" not in before  # tied: one weight, one name
    for layout in LAYOUTS:
        longer = replace(config, train=replace(config.train, steps=7))
        with pytest.raises(StopError):
            train(longer, tmp_path / "run", resume=True, prepare=save_and_stop, **layout)
        after = contents(tmp_path / "run")
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)


class StopError(Exception):
    """Ends a run before its first step."""


def save_and_stop(trainer: Trainer, flag: StopFlag) -> None:
    trainer.save()
    raise StopError


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Checkpoint, RunConfig]:
    config = config_of(tmp_path, "--train.steps", "1")
    train(config, tmp_path / "run")
    return Checkpoint.open(find_latest(tmp_path / "run" / "checkpoints")), config


def test_progress_is_what_was_saved(saved: tuple[Checkpoint, RunConfig]) -> None:
    checkpoint, _ = saved
    progress = Progress.of(checkpoint)
    assert (progress.step, progress.cursor.sample, progress.tokens) == (1, 4, 64)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model.hidden-size", "32"), r"of another model: embed.tokens.weight is \(\d+, 16\)"),
        (("--model.num-layers", "3"), r"layers.2.*is not there"),
        (("--model.num-layers", "1"), r"this run's has no layers.1"),
        (("--model.tied", "true"), r"this run's has no head.output.weight"),
        (("--optimizer.name", "SGD"), r"has the state of AdamW, and optimizer.name = 'SGD'"),
    ],
)
def test_another_model_or_optimizer_is_refused(
    words: tuple[str, ...], message: str, saved: tuple[Checkpoint, RunConfig], tmp_path: Path
) -> None:
    checkpoint, _ = saved
    other = config_of(tmp_path, *words)
    spec, _ = model_and_plan(other)
    with pytest.raises(ConfigError, match=message):
        require_match(checkpoint, spec, other)


def test_the_same_run_is_accepted(saved: tuple[Checkpoint, RunConfig]) -> None:
    checkpoint, config = saved
    require_match(checkpoint, model_and_plan(config)[0], config)


def test_a_checkpoint_that_no_run_wrote_is_refused(saved: tuple[Checkpoint, RunConfig]) -> None:
    checkpoint, _ = saved
    checkpoint._index = replace(checkpoint._index, extra={})
    with pytest.raises(CheckpointError, match="not written by `terashard train`"):
        Progress.of(checkpoint)


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    config = config_of(tmp_path, "--train.steps", "2")
    drawn: list[Tensor] = []

    def draw(trainer: Trainer, flag: StopFlag) -> None:
        trainer.callbacks.append(lambda trainer, record: drawn.append(torch.rand(3)))

    kept = torch.get_rng_state()
    torch.manual_seed(7)
    train(config, tmp_path / "run", prepare=draw)
    expected = torch.rand(3)
    torch.manual_seed(1)
    longer = config_of(tmp_path, "--train.steps", "3")
    train(longer, tmp_path / "run", resume=True, prepare=draw)
    torch.set_rng_state(kept)
    assert torch.equal(drawn[2], expected)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("--batch.tokens", "8"), "batch.tokens says 16 there and 8 here"),
        (("--data.held-out", "0.3"), "data.held_out"),
        (("--data.shuffle", "false"), "data.shuffle says True there and False here"),
        (("--run.seed", "1"), "run.seed says 0 there and 1 here"),
    ],
)
def test_settings_that_give_a_samples_number_another_meaning_are_refused(
    words: tuple[str, ...], key: str, saved: tuple[Checkpoint, RunConfig], tmp_path: Path
) -> None:
    """The cursor stayed, and the run trained on some tokens twice and on others never."""
    checkpoint, _ = saved
    with pytest.raises(ConfigError, match=rf"has trained on other samples: {key}.*begin a new run"):
        require_same_samples(checkpoint, Samples.of(config_of(tmp_path, *words)))


def test_other_text_is_refused_and_the_same_text_elsewhere_is_not(
    saved: tuple[Checkpoint, RunConfig], tmp_path: Path
) -> None:
    checkpoint, _ = saved
    for text, same in ((TEXT, True), (TEXT[::-1], False)):
        folder = tmp_path / str(same)
        folder.mkdir()
        path = text_folder(folder, [text]).path
        samples = Samples.of(config_of(tmp_path, "--data.train", str(path)))
        if same:
            require_same_samples(checkpoint, samples)
        else:
            with pytest.raises(ConfigError, match=r"other samples: data\.train says"):
                require_same_samples(checkpoint, samples)


def test_a_batch_of_other_sequences_goes_on_from_the_same_sample(
    saved: tuple[Checkpoint, RunConfig], tmp_path: Path
) -> None:
    checkpoint, _ = saved
    require_same_samples(checkpoint, Samples.of(config_of(tmp_path, "--batch.sequences", "2")))


def test_a_resume_draws_no_initial_values(
    saved: tuple[Checkpoint, RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole model's were drawn, and overwritten by those of the checkpoint."""

    def refuse(*_: object) -> None:
        raise AssertionError("initial values were drawn")

    monkeypatch.setattr(worker.Initialiser, "__call__", refuse)
    longer = config_of(tmp_path, "--train.steps", "2")
    assert len(train(longer, tmp_path / "run", resume=True, stages=2)) == 2


def test_random_numbers_of_a_gpu_go_on_too(
    saved: tuple[Checkpoint, RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the CPU's generator was kept: dropout on a GPU drew other numbers after a resume."""
    device = torch.device("cuda", 3)
    world = SimpleNamespace(size=1, gather_bytes=lambda mine: [mine])
    mesh = cast(Any, SimpleNamespace(world=world, rank=0, device=device))
    there = torch.arange(16, dtype=torch.uint8)
    set_to: list[tuple[Tensor, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: there)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *given: set_to.append(given))
    checkpoint, _ = saved
    found = {"random": state._random_states(mesh)}
    checkpoint._index = replace(checkpoint._index, extra=found)
    restore_random_state(mesh, checkpoint)
    ((value, where),) = set_to
    assert torch.equal(value, there)
    assert where == device
    mesh.device = torch.device("cpu")
    restore_random_state(mesh, checkpoint)
    assert len(set_to) == 1


@pytest.mark.parametrize(
    ("key", "group", "home"),
    [
        ("step", {}, "cpu"),
        ("step", {"fused": False, "capturable": None}, "cpu"),
        ("step", {"fused": True}, "cuda"),
        ("step", {"capturable": True}, "cuda"),
        ("eta", {}, "cuda"),
    ],
)
def test_steps_are_counted_where_torch_counts_them(
    key: str, group: dict[str, Any], home: str
) -> None:
    """All numbers went to the GPU: a plain optimizer then waits for it at every parameter."""
    assert scalar_device(key, group, torch.device("cuda")) == torch.device(home)


@pytest.mark.parametrize(
    ("name", "option"), [("AdamW", "amsgrad"), ("RMSprop", "momentum"), ("RMSprop", "centered")]
)
def test_an_option_whose_state_was_never_kept_is_refused(
    name: str, option: str, tmp_path: Path
) -> None:
    """The resume ended with a KeyError at its first step."""
    words = ("--optimizer.name", name, "--train.steps", "1")
    train(config_of(tmp_path, *words), tmp_path / "run")
    checkpoint = Checkpoint.open(find_latest(tmp_path / "run" / "checkpoints"))
    value = "0.5" if option == "momentum" else "true"
    options = f"{{{option} = {value}}}"
    group = f'[{{match = "layers.1.*", options = {options}}}]'
    for more in (("--optimizer.options", options), ("--optimizer.groups", group)):
        other = config_of(tmp_path, *words, *more)
        with pytest.raises(ConfigError, match=rf"{option} = .* leave {option} as it was"):
            require_match(checkpoint, model_and_plan(other)[0], other)


def test_a_run_goes_on_in_another_precision(
    saved: tuple[Checkpoint, RunConfig], tmp_path: Path
) -> None:
    """The moments stayed float32, and no kernel took them with float64 parameters."""
    double = config_of(tmp_path, "--train.steps", "2", "--train.precision", "fp64")
    assert len(train(double, tmp_path / "run", resume=True)) == 2
    kept = {v.dtype for n, v in contents(tmp_path / "run").items() if "exp_avg" in n}
    assert kept == {torch.float64}


def test_momentum_may_begin_late_where_torch_lets_it(tmp_path: Path) -> None:
    words = ("--optimizer.name", "SGD", "--train.steps")
    train(config_of(tmp_path, *words, "1"), tmp_path / "run")
    later = config_of(tmp_path, *words, "2", "--optimizer.options", "{momentum = 0.5}")
    checkpoint = Checkpoint.open(find_latest(tmp_path / "run" / "checkpoints"))
    require_match(checkpoint, model_and_plan(later)[0], later)
    assert len(train(later, tmp_path / "run", resume=True)) == 2


def test_a_resume_replaces_the_configuration_only_after_a_step(
    saved: tuple[Checkpoint, RunConfig], tmp_path: Path
) -> None:
    """A resume that failed at once left its own settings, and the next one failed of them too."""
    longer = config_of(tmp_path, "--train.steps", "3")
    _, plan = model_and_plan(longer)
    written = tmp_path / "run" / "config.toml"
    seen: list[bool] = []

    def prepare(trainer: Trainer, flag: StopFlag) -> None:
        trainer.callbacks.append(lambda trainer, record: seen.append(written.exists()))
        worker._describe(trainer, plan, resumed=True)
        seen.append(written.exists())

    train(longer, tmp_path / "run", resume=True, prepare=prepare)
    assert seen == [False, True, True]
