"""One rank's process: from a run directory to a trained model. ``python -m terashard.train.worker RUN_DIR [--resume]``."""

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from terashard.checkpoint.load import Checkpoint, find_latest
from terashard.comm.mesh import Mesh
from terashard.comm.ping import ping
from terashard.config.schema import RunConfig
from terashard.data.tokens import TokenFolder
from terashard.errors import ConfigError, TerashardError
from terashard.nn.attention import self_check
from terashard.nn.build import build_stage
from terashard.nn.init import Initialiser
from terashard.nn.loss import CrossEntropy
from terashard.nn.protocols import StageModule
from terashard.plan.plan import Plan, plan_of
from terashard.runtime.pipeline import Pipeline
from terashard.shard.precision import Precision
from terashard.spec.model import ModelSpec, describe
from terashard.train.directory import RunDirectory
from terashard.train.progress import display_for
from terashard.train.stop import StopFlag, end_with_parent
from terashard.train.trainer import Trainer

log = logging.getLogger("terashard")

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

    @classmethod
    def of_environment(cls) -> "Place":
        """What torch's launcher put into the environment."""
        return cls(*(int(os.environ[k]) for k in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))


def train(config: RunConfig, directory: RunDirectory, *, resume: bool) -> str:
    """Train as the rank that the environment names; returns "finished" or "stopped"."""
    flag = StopFlag()
    flag.listen()
    end_with_parent()
    place = Place.of_environment()
    torch.set_num_threads(config.run.threads or _threads(place))
    spec, plan = model_and_plan(config)
    mesh = Mesh.of_processes(
        replicas=plan.replicas,
        shards=plan.shards,
        stages=plan.stages,
        device=_device(config, place),
        timeout=config.run.timeout,
    )
    try:
        ping(mesh, min(config.run.timeout, 30.0))
        checkpoint = Checkpoint.open(find_latest(directory.checkpoints)) if resume else None
        trainer = _trainer(config, spec, plan, mesh, directory, flag)
        if checkpoint is not None:
            trainer.restore(checkpoint)
        log.info("%s begins at step %d of %d", mesh, trainer.progress.step, trainer.steps)
        state = trainer.run()
        log.info("%s %s after step %d", mesh, state, trainer.progress.step)
        if place.rank == 0:
            directory.write_status(state, trainer.progress.step)
        mesh.world.barrier()
    finally:
        mesh.close()
    return state


def model_and_plan(config: RunConfig) -> tuple[ModelSpec, Plan]:
    """What the model is, and how the run is cut."""
    vocab_size = TokenFolder.open(config.data.train).vocab_size
    spec = describe(config.model, vocab_size=vocab_size, max_length=config.batch.tokens)
    return spec, plan_of(config, config.model.num_layers)


def _trainer(
    config: RunConfig,
    spec: ModelSpec,
    plan: Plan,
    mesh: Mesh,
    directory: RunDirectory,
    flag: StopFlag,
) -> Trainer:
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
    pipeline = Pipeline(
        stage,
        plan,
        mesh,
        loss=_loss(config),
        precision=precision,
        fill=Initialiser(spec, config.run.seed),
    )
    display = display_for(mesh.rank, config.train.log_every)
    return Trainer(config, pipeline, directory, flag=flag, display=display)


def _loss(config: RunConfig) -> CrossEntropy:
    loss = config.loss
    return CrossEntropy(
        chunk_tokens=loss.chunk_tokens,
        ignore_index=loss.ignore_index,
        label_smoothing=loss.label_smoothing,
        z_loss=loss.z_loss,
        soft_cap=loss.soft_cap,
    )


def _threads(place: Place) -> int:
    return max(1, len(os.sched_getaffinity(0)) // place.local_size)


def _device(config: RunConfig, place: Place) -> torch.device:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.run.device == "cpu" or (config.run.device == "auto" and found < place.local_size):
        return torch.device("cpu")
    if found == 0:
        raise ConfigError("run.device = 'cuda', but torch sees no CUDA device; use 'auto' or 'cpu'")
    return torch.device("cuda", place.local_rank % found)


def _keep_log(directory: RunDirectory, place: Place) -> None:
    """Log into this rank's file; of ranks other than the first, whatever they print as well."""
    path = directory.log(place.rank)
    logging.basicConfig(
        filename=path, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if place.rank:
        with path.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)


def work(config: RunConfig, directory: RunDirectory, *, resume: bool) -> int:
    """``train``, with logs and with failures written down; returns the exit code."""
    place = Place.of_environment()
    _keep_log(directory, place)
    try:
        train(config, directory, resume=resume)
    except Exception as error:
        level = logging.ERROR if isinstance(error, TerashardError) else logging.CRITICAL
        log.log(level, "rank %d failed", place.rank, exc_info=True)
        directory.write_error(place.rank, error)
        return 1
    return 0


def main(words: list[str]) -> int:
    """The process that ``launch`` starts."""
    directory = RunDirectory(Path(words[0]))
    return work(directory.config(), directory, resume="--resume" in words[1:])


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a daemon thread of a broken transport must not keep the process
