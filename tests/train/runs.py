"""Small runs on meshes of threads, for tests."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terashard.checkpoint.load import Checkpoint, find_latest
from terashard.comm.mesh import Mesh
from terashard.config.load import load
from terashard.config.schema import RunConfig
from terashard.train.directory import RunDirectory
from terashard.train.preflight import model_and_plan
from terashard.train.progress import Silent
from terashard.train.record import StepRecord, read_records
from terashard.train.stop import StopFlag
from terashard.train.trainer import Trainer
from terashard.train.worker import build_pipeline
from tests.data.folders import text_folder
from tests.helpers.threads import run_mesh

torch.set_num_threads(1)

LAYOUT = {"stages": 1, "shards": 1, "replicas": 1}
SMALL = """
model = {hidden_size = 16, num_layers = 2, num_heads = 2, mlp_size = 32}
batch = {sequences = 4, tokens = 16}
parallel = {slices = 2}
train = {steps = 6}
optimizer = {warmup = 2}
data = {held_out = 0.1}
"""
TEXT = "".join(f"{i} times {i} is {i * i}; " for i in range(30))


def config_of(folder: Path, *words: str) -> RunConfig:
    """A run that takes milliseconds a step, with ``words`` of a command line on top."""
    file = folder / "run.toml"
    file.write_text(SMALL)
    return load(file, ("--data.train", str(tokens(folder)), *words))


def tokens(folder: Path) -> Path:
    """The token folder of ``TEXT``, made once."""
    if not (folder / "tokens").exists():
        text_folder(folder, [TEXT])
    return folder / "tokens"


def train(
    config: RunConfig,
    directory: Path,
    *,
    resume: bool = False,
    prepare: Callable[[Trainer, StopFlag], None] = lambda trainer, flag: None,
    **layout: int,
) -> list[dict[str, Any]]:
    """The records of a run on a mesh of threads; ``prepare`` sees every rank's trainer before."""
    layout = LAYOUT | layout
    config = replace(config, parallel=replace(config.parallel, **layout))
    directory.mkdir(exist_ok=True)

    def work(mesh: Mesh) -> None:
        spec, plan = model_and_plan(config)
        found = find_latest(directory / "checkpoints") if resume else None
        checkpoint = Checkpoint.open(found) if found else None
        flag = StopFlag()
        trainer = Trainer(
            config,
            build_pipeline(config, spec, plan, mesh, checkpoint),
            RunDirectory(directory),
            flag=flag,
            display=Silent(),
        )
        if checkpoint is not None:
            trainer.restore(checkpoint)
        prepare(trainer, flag)
        trainer.run()

    run_mesh(work, **layout)
    return read_records(directory / "metrics.jsonl")


def after_step(step: int, act: Callable[[Trainer], None]) -> Callable[[Trainer, StopFlag], None]:
    """For ``prepare``: do ``act`` after ``step``, as a callback."""

    def call(trainer: Trainer, record: StepRecord) -> None:
        if record.step == step:
            act(trainer)

    return lambda trainer, flag: trainer.callbacks.append(call)


def stop_after(step: int) -> Callable[[Trainer, StopFlag], None]:
    """For ``prepare``: end the run after ``step``."""
    return after_step(step, lambda trainer: setattr(trainer, "stopping", True))


def numbers(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What must be the same however a run is interrupted: all but times."""
    names = ("step", "loss", "gradient_norm", "lr", "tokens_total", "epoch", "held_out_loss")
    return [tuple(record[name] for name in names) for record in records]


def rows_of(trainer: Trainer) -> dict[str, Tensor]:
    """This rank's rows of every parameter; to write into them is to change the parameter."""
    named = trainer.pipeline.named_parameters()
    return {name: p.detach().to_local() for name, p in named}  # type: ignore[attr-defined]
