"""One rank's process: from a run directory to a trained model."""

import json
import logging
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from terashard.checkpoint.load import Checkpoint, find_latest
from terashard.comm.mesh import Mesh
from terashard.comm.ping import ping
from terashard.config.load import load
from terashard.config.schema import RunConfig
from terashard.config.write import versions
from terashard.errors import ConfigError, TerashardError
from terashard.nn.attention import self_check
from terashard.nn.build import build_stage
from terashard.nn.init import Initialiser
from terashard.nn.loss import CrossEntropy
from terashard.nn.protocols import StageModule
from terashard.plan.plan import Plan
from terashard.runtime.pipeline import Pipeline
from terashard.shard.precision import Precision
from terashard.spec.model import ModelSpec
from terashard.train.directory import RunDirectory
from terashard.train.preflight import model_and_plan, threads_each
from terashard.train.progress import display_for
from terashard.train.record import StepRecord
from terashard.train.state import fill_from
from terashard.train.stop import StopFlag
from terashard.train.trainer import Trainer

log = logging.getLogger("terashard")

PING_SECONDS = 30.0

PRECISIONS = {
    "fp32": Precision(compute=torch.float32, master=torch.float32),
    "bf16": Precision(compute=torch.bfloat16, master=torch.float32),
    "fp64": Precision(compute=torch.float64, master=torch.float64),
}


@dataclass(frozen=True, slots=True)
class Place:
    """This process among those of the run, as the launcher says."""

    rank: int
    local_rank: int
    local_size: int
    machine: str

    @classmethod
    def of_environment(cls) -> "Place":
        """What torch's launcher put into the environment."""
        return cls(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
            machine=f"{os.environ.get('GROUP_RANK', '')} on {socket.gethostname()}",
        )


def main(words: list[str], flag: StopFlag) -> None:
    """The process that ``launch`` starts; does not return."""
    directory = RunDirectory(Path(words[0]))
    resume = "--resume" in words[1:]
    config = load(directory.request) if resume else directory.config()
    leave(work(config, directory, flag, resume=resume))


def leave(code: int) -> None:
    """End this process now: a thread of a broken transport must not keep it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def work(config: RunConfig, directory: RunDirectory, flag: StopFlag, *, resume: bool) -> int:
    """``train``, with logs and with failures written down; returns the exit code."""
    place = Place.of_environment()
    try:
        _keep_log(directory, place)
        train(config, directory, flag, resume=resume)
    except BaseException as error:  # a callback's SystemExit too: the other ranks wait for this one
        level = logging.ERROR if isinstance(error, TerashardError) else logging.CRITICAL
        log.log(level, "rank %d failed", place.rank, exc_info=True)
        directory.write_error(place.rank, error)
        return 1
    return 0


def train(config: RunConfig, directory: RunDirectory, flag: StopFlag, *, resume: bool) -> None:
    """Train as the rank that the environment names, to the end or until asked to stop."""
    place = Place.of_environment()
    torch.set_num_threads(threads_each(config.run, place.local_size))
    spec, plan = model_and_plan(config)
    mesh = Mesh.of_processes(
        replicas=plan.replicas,
        shards=plan.shards,
        stages=plan.stages,
        device=_device(config, place),
        timeout=config.run.timeout,
    )
    ping(mesh, min(config.run.timeout, PING_SECONDS))
    flag.look_after(_neighbours(mesh, place))
    checkpoint = Checkpoint.open(find_latest(directory.checkpoints)) if resume else None
    trainer = Trainer(
        config,
        build_pipeline(config, spec, plan, mesh, checkpoint),
        directory,
        flag=flag,
        display=display_for(mesh.rank, config.train.log_every),
    )
    if checkpoint is not None:
        trainer.restore(checkpoint)
    log.info("%s of %s; versions: %s", mesh, plan, versions())
    mesh.world.barrier()
    if trainer.leads:
        _describe(trainer, plan, resumed=resume)
        directory.write_status("running", trainer.progress.step)
    log.info("begins at step %d of %d", trainer.progress.step, trainer.steps)
    state = trainer.run()
    if trainer.leads:
        directory.write_status(state, trainer.progress.step)
    mesh.world.barrier()
    flag.rest()
    mesh.close()


def build_pipeline(
    config: RunConfig,
    spec: ModelSpec,
    plan: Plan,
    mesh: Mesh,
    checkpoint: Checkpoint | None = None,
) -> Pipeline:
    """This rank's stage of the model, with its initial values or those of ``checkpoint``."""
    precision, last = PRECISIONS[config.train.precision], plan.stages - 1

    def stage(index: int) -> StageModule:
        layers = range(*plan.layers[index])
        return build_stage(spec, layers, first=index == 0, last=index == last)

    self_check(
        mesh.device,
        precision.compute,
        head_dim=spec.head_dim,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
    )
    return Pipeline(
        stage,
        plan,
        mesh,
        loss=_loss(config),
        precision=precision,
        fill=Initialiser(spec, config.run.seed)
        if checkpoint is None
        else fill_from(checkpoint, spec),
    )


def _describe(trainer: Trainer, plan: Plan, *, resumed: bool) -> None:
    """Write what the run is; a resume has to do a step before it replaces what worked."""
    if not resumed:
        trainer.directory.describe(trainer.config, plan)
        return
    first = trainer.progress.step + 1

    def once(trainer: Trainer, record: StepRecord) -> None:
        if record.step == first:
            trainer.directory.describe(trainer.config, plan)

    trainer.callbacks.insert(0, once)


def _loss(config: RunConfig) -> CrossEntropy:
    loss = config.loss
    return CrossEntropy(
        chunk_tokens=loss.chunk_tokens,
        ignore_index=loss.ignore_index,
        label_smoothing=loss.label_smoothing,
        z_loss=loss.z_loss,
        soft_cap=loss.soft_cap,
    )


def _neighbours(mesh: Mesh, place: Place) -> dict[int, int]:
    """Rank → process of the other ranks that the same launcher started."""
    mine = json.dumps([place.machine, os.getpid()]).encode()
    told = [json.loads(text) for text in mesh.world.gather_bytes(mine)]
    return {
        rank: process
        for rank, (machine, process) in enumerate(told)
        if machine == place.machine and rank != mesh.rank
    }


def _device(config: RunConfig, place: Place) -> torch.device:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.run.device == "cpu" or (config.run.device == "auto" and found < place.local_size):
        return torch.device("cpu")
    if found < place.local_size:
        raise ConfigError(
            f"run.device = 'cuda', but torch sees {found} CUDA devices for {place.local_size}"
            " processes; use 'auto' or 'cpu', or fewer processes"
        )
    return torch.device("cuda", place.local_rank)


def _keep_log(directory: RunDirectory, place: Place) -> None:
    """Log into this rank's file, with what it prints; the first rank keeps its standard output."""
    path = directory.log(place.rank)
    logging.basicConfig(
        filename=path, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.captureWarnings(True)
    with path.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 2)
        if place.rank:
            os.dup2(file.fileno(), 1)
