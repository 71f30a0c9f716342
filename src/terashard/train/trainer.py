"""The loop: batch → pipeline → optimizer → record → checkpoint.

Everything that decides how a run goes on is the same number on every rank: the loss, the gradient norm and the stop flag
come out of one reduction per step. So all ranks skip, stop and save after the same step without asking each other again.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module

import torch

from terashard.checkpoint.load import Checkpoint
from terashard.checkpoint.random_state import decode_torch_state, encode_torch_state
from terashard.checkpoint.save import save
from terashard.config.schema import RunConfig
from terashard.config.write import dump, versions
from terashard.data.batches import Cursor
from terashard.errors import CheckpointError, ConfigError, RunError
from terashard.runtime.pipeline import Pipeline, StepResult
from terashard.simulate.timeline import Timeline
from terashard.train.directory import RunDirectory
from terashard.train.optimizer import build_optimizer, set_rate
from terashard.train.progress import Display
from terashard.train.rate import learning_rate
from terashard.train.record import Metrics, StepRecord
from terashard.train.samples import Samples
from terashard.train.state import pieces, restore_model, restore_optimizer
from terashard.train.stop import StopFlag

Callback = Callable[["Trainer", StepRecord], None]


@dataclass(slots=True)
class Progress:
    """How far a run has come: what a resume needs besides tensors."""

    step: int = 0
    cursor: Cursor = Cursor()
    tokens: int = 0
    non_finite: int = 0


class Trainer:
    """One rank of a training run."""

    def __init__(
        self,
        config: RunConfig,
        pipeline: Pipeline,
        directory: RunDirectory,
        *,
        flag: StopFlag,
        display: Display,
    ) -> None:
        self.config, self.pipeline, self.directory = config, pipeline, directory
        self.flag, self.display = flag, display
        self.samples = Samples.of(config, pipeline.mesh)
        named = ((pipeline.canonical(name), p) for name, p in pipeline.named_parameters())
        self.optimizer = build_optimizer(config.optimizer, named)
        self.progress = Progress()
        self.steps = self._length()
        self.callbacks = [_callback(name) for name in config.train.callbacks]
        self.stopping = False
        self._saved_step = -1
        self._timeline = Timeline(())
        self._metrics: Metrics | None = None

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from ``checkpoint``, whatever layout it was saved in."""
        restore_model(self.pipeline, checkpoint)
        restore_optimizer(self.pipeline, self.optimizer, checkpoint)
        found = dict(checkpoint.extra)
        try:
            self.progress = Progress(
                step=checkpoint.step,
                cursor=Cursor.from_json(found["cursor"]),
                tokens=found["tokens"],
                non_finite=found["non_finite"],
            )
            states = found["random"]
        except (KeyError, TypeError) as cause:
            raise CheckpointError(
                f"{checkpoint.path} lacks {cause}; it was not written by a run"
            ) from cause
        if len(states) == self.pipeline.mesh.world.size:
            torch.set_rng_state(decode_torch_state(states[self.pipeline.mesh.rank]))
        self._saved_step = self.progress.step

    def run(self) -> str:
        """Train to the end, or until asked to stop; returns "finished" or "stopped"."""
        first = self.pipeline.mesh.rank == 0
        if self.progress.step >= self.steps:
            raise ConfigError(
                f"the run has done {self.progress.step} of {self.steps} steps and is complete;"
                " give a greater --train.steps to go on"
            )
        if first:
            self._metrics = Metrics(self.directory.metrics, after_step=self.progress.step)
        self.display.start(self.progress.step, self.steps)
        try:
            while self.progress.step < self.steps and not self.stopping:
                self._report(self._step())
            self._finish()
        finally:
            self.display.stop()
            if self._metrics is not None:
                self._metrics.close()
        return "finished" if self.progress.step >= self.steps else "stopped"

    def evaluate(self) -> float | None:
        """Mean loss per target token of the held-out batches; None if nothing is held out."""
        total, count = 0.0, 0
        ignore = self.config.loss.ignore_index
        for index in range(self.config.train.evaluate_batches):
            drawn = self.samples.draw_held_out(index, ignore)
            if drawn is None:
                break
            loss, tokens = self.pipeline.evaluate(*drawn)
            total, count = total + loss * tokens, count + tokens
        return total / count if count else None

    def save(self) -> None:
        """Write a checkpoint of the present step, after a look at tied weights."""
        self.pipeline.require_equal_ties()
        self._saved_step = self.progress.step
        world = self.pipeline.mesh.world
        states = world.gather_bytes(encode_torch_state(torch.get_rng_state()).encode())
        progress = self.progress
        save(
            self.directory.checkpoints,
            progress.step,
            pieces(self.pipeline, self.optimizer),
            {
                "cursor": progress.cursor.to_json(),
                "tokens": progress.tokens,
                "non_finite": progress.non_finite,
                "random": [state.decode() for state in states],
                "plan": json.loads(json.dumps(asdict(self.pipeline.plan))),
                "config": dump(self.config),
                "versions": versions(),
            },
            group=world,
            keep=self.config.checkpoint.keep,
        )

    def _length(self) -> int:
        """Steps of the whole run."""
        train, batch = self.config.train, self.config.batch
        if train.steps is not None:
            return train.steps
        if train.tokens is not None:
            return math.ceil(train.tokens / (batch.sequences * batch.tokens))
        if train.epochs is not None:
            return math.ceil(train.epochs * self.samples.training.num_samples / batch.sequences)
        raise ConfigError(
            "the run has no length; give one of train.steps, train.tokens, train.epochs"
        )

    def _step(self) -> StepRecord:
        started = time.perf_counter()
        progress, tokens = self.progress, self.samples.draw(self.progress.cursor)
        epoch = progress.cursor.epoch(self.samples.training)
        result = self.pipeline.step(*tokens, signals=[float(self.flag.asked)])
        rate = learning_rate(self.config.optimizer, progress.step, self.steps)
        skipped = self._update(result, rate)
        self.stopping |= result.signals[0] > 0
        self._timeline = result.timeline
        progress.step += 1
        progress.cursor = progress.cursor.advance(self.config.batch.sequences)
        progress.tokens += result.tokens
        seconds = time.perf_counter() - started
        return StepRecord(
            step=progress.step,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            lr=rate,
            tokens=result.tokens,
            tokens_total=progress.tokens,
            epoch=epoch,
            seconds=seconds,
            tokens_per_second=result.tokens / seconds,
            idle_share=result.idle_share,
            non_finite=progress.non_finite,
            skipped=skipped,
        )

    def _update(self, result: StepResult, rate: float) -> bool:
        """Clip and step; returns whether the update was left out."""
        if not (math.isfinite(result.loss) and math.isfinite(result.gradient_norm)):
            self.progress.non_finite += 1
            policy = self.config.train.non_finite
            self.display.say(
                f"step {self.progress.step + 1}: loss {result.loss}, gradient norm {result.gradient_norm}"
                f" ({policy}, {self.progress.non_finite} so far)"
            )
            if policy == "stop":
                self.stopping = True
            if policy != "count":
                return True
        limit = self.config.optimizer.clip_norm
        if limit is not None and result.gradient_norm > limit:
            self.pipeline.scale_gradients(limit / (result.gradient_norm + 1e-6))
        peak = self.config.optimizer.lr
        set_rate(self.optimizer, rate / peak if peak else 0.0)
        self.optimizer.step()
        return False

    def _report(self, record: StepRecord) -> None:
        every = self.config.train.evaluate_every
        if (every and record.step % every == 0) or record.step == self.steps:
            held_out = self.evaluate()
            if held_out is not None:
                record = StepRecord(**(asdict(record) | {"held_out_loss": held_out}))
                self.display.say(f"step {record.step}: held-out loss {held_out:.4f}")
        if self._metrics is not None:
            self._metrics.write(record)
        self.display.show(record)
        for callback in self.callbacks:
            callback(self, record)
        every = self.config.checkpoint.every
        if every and record.step % every == 0:
            self.save()

    def _finish(self) -> None:
        """The last checkpoint, and every rank's spans of the last step in one file."""
        if self._saved_step != self.progress.step:
            self.save()
        world = self.pipeline.mesh.world
        rows = world.gather_bytes(json.dumps(self._timeline.as_json()).encode())
        if self.pipeline.mesh.rank == 0:
            ranks: Sequence[object] = [json.loads(row) for row in rows]
            found = {
                "format": "terashard-timeline",
                "version": 1,
                "step": self.progress.step,
                "ranks": ranks,
            }
            self.directory.timeline.write_text(json.dumps(found) + "\n")


def _callback(name: str) -> Callback:
    """The function that ``module:name`` names."""
    module, _, attribute = name.partition(":")
    try:
        found: Callback = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as cause:
        raise ConfigError(
            f"train.callbacks: {name!r} cannot be imported ({cause}); write module:name"
        ) from cause
    if not callable(found):
        raise RunError(f"train.callbacks: {name!r} is no function")
    return found
