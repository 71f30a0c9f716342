"""The loop: batch → pipeline → optimizer → record → evaluation → callbacks → checkpoint.

Everything that decides how a run goes on is the same number on every rank: the loss, the gradient
norm and the stop flag come out of one reduction per step. So all ranks skip, stop and save after
the same step without asking each other again.
"""

import json
import logging
import math
import time
from dataclasses import replace
from typing import Literal

from terashard.checkpoint.load import Checkpoint
from terashard.checkpoint.save import save
from terashard.config.schema import RunConfig
from terashard.errors import CommunicationError, RunError
from terashard.files import replace_text
from terashard.nn.loss import CrossEntropy
from terashard.runtime.pipeline import Pipeline, StepResult
from terashard.simulate.timeline import Timeline
from terashard.train import state
from terashard.train.callbacks import load_callback
from terashard.train.directory import RunDirectory
from terashard.train.failure import resume_command
from terashard.train.optimizer import build_optimizer, set_rate
from terashard.train.preflight import require_work
from terashard.train.progress import Display
from terashard.train.rate import part_of_peak
from terashard.train.record import Metrics, StepRecord
from terashard.train.samples import Samples, rows_of
from terashard.train.stop import StopFlag
from terashard.units import show_bytes, show_count, show_seconds

log = logging.getLogger("terashard")


class Trainer:
    """One rank of a training run. The attributes without an underscore are for callbacks too."""

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
        self.samples, self.rows = Samples.of(config), rows_of(config, pipeline.mesh)
        named = ((pipeline.canonical(name), p) for name, p in pipeline.named_parameters())
        self.optimizer = build_optimizer(config.optimizer, named)
        self.progress = state.Progress()
        self.steps = self.samples.steps(config)
        self.stopping = False
        self._cross_entropy = CrossEntropy(
            chunk_tokens=config.loss.chunk_tokens,
            ignore_index=config.loss.ignore_index,
            soft_cap=config.loss.soft_cap,
        )
        self._flag, self._display = flag, display
        self.callbacks = [load_callback(name) for name in config.train.callbacks]
        self._fault = ""
        self._saved_step = -1
        self._timeline = Timeline(())
        self._metrics: Metrics | None = None
        self._last: StepRecord | None = None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes and prints for all."""
        return self.pipeline.mesh.rank == 0

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from ``checkpoint``, with whose parameters the pipeline was filled."""
        state.restore_optimizer(self.pipeline, self.optimizer, checkpoint)
        state.restore_random_state(self.pipeline.mesh, checkpoint)
        self.progress = state.Progress.of(checkpoint)
        self._saved_step = self.progress.step
        log.info("restored %s", checkpoint.path)

    def run(self) -> Literal["finished", "stopped"]:
        """Train to the end, or until asked to stop."""
        require_work(self.progress.step, self.steps)
        if self.leads:
            self._metrics = Metrics(self.directory.metrics, after_step=self.progress.step)
        began, first = time.monotonic(), self.progress.step + 1
        self._display.start(self.progress.step, self.steps)
        self._flag.begin(lambda: self.say("stopping after this step; once more stops at once"))
        if not self.config.checkpoint.every:
            self.say("checkpoints: at the end, and when stopped (checkpoint.every = 0)")
        if self.pipeline.mesh.shards > 1:
            planned = self.pipeline.planned_traffic
            self.say(
                f"sharding: {show_count(planned.gathers, 'gather')} and"
                f" {show_count(planned.reductions, 'reduction')} per step,"
                f" {show_bytes(planned.gathered_bytes)} and {show_bytes(planned.reduced_bytes)},"
                f" {planned.volumes:.2f} times a stage's parameters"
            )
        if self.samples.held_out is None:
            self.say(f"no evaluation: nothing is held out ({self.samples.nothing_held_out})")
        try:
            while self.progress.step < self.steps and not self.stopping:
                self._end_step(self._step())
            self._finish()
        except CommunicationError as cause:
            raise self._located(cause) from cause
        finally:
            self._display.stop()
            if self._metrics is not None:
                self._metrics.close()
        if self._fault:
            raise RunError(f"{self._fault}: stopped, as train.non_finite says, and saved")
        return self._conclude(first, time.monotonic() - began)

    def evaluate(self) -> float | None:
        """Cross-entropy per target token of the held-out batches; None if nothing is held out."""
        total, count = 0.0, 0
        ignore = self.config.loss.ignore_index
        for index in range(self.config.train.evaluate_batches):
            drawn = self.samples.draw_held_out(index, self.rows, ignore)
            if drawn is None:
                break
            loss, tokens = self.pipeline.evaluate(*drawn, loss=self._cross_entropy)
            total, count = total + loss * tokens, count + tokens
        return total / count if count else None

    def save(self) -> None:
        """Write a checkpoint of the present step, after a look at tied weights."""
        self.pipeline.require_equal_ties()
        began = time.monotonic()
        path = save(
            self.directory.checkpoints,
            self.progress.step,
            state.pieces(self.pipeline, self.optimizer),
            state.extra(self.progress, self.config, self.samples, self.pipeline),
            group=self.pipeline.mesh.world,
            keep=self.config.checkpoint.keep,
        )
        self._saved_step = self.progress.step
        log.info("saved %s in %s", path, show_seconds(time.monotonic() - began))

    def say(self, line: str) -> None:
        """Tell the person who watches (rank 0 does), and the log of this rank."""
        self._display.say(line)
        log.info(line)

    def _step(self) -> StepRecord:
        began, progress = time.perf_counter(), self.progress
        epoch = progress.cursor.epoch(self.samples.training)
        drawn = self.samples.draw(progress.cursor, self.rows)
        result = self.pipeline.step(*drawn, signals=[float(self._flag.asked)])
        part = part_of_peak(self.config.optimizer, progress.step, self.steps)
        skipped = self._update(result, part)
        self.stopping |= result.signals[0] > 0
        self._timeline = result.timeline
        progress.step += 1
        progress.cursor = progress.cursor.advance(self.samples.sequences)
        progress.tokens += result.tokens
        seconds = time.perf_counter() - began
        return StepRecord(
            step=progress.step,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            lr=self.config.optimizer.lr * part,
            tokens=result.tokens,
            tokens_total=progress.tokens,
            epoch=epoch,
            seconds=seconds,
            tokens_per_second=result.tokens / seconds,
            idle_share=result.idle_share,
            non_finite=progress.non_finite,
            skipped=skipped,
        )

    def _update(self, result: StepResult, part: float) -> bool:
        """Clip and step at ``part`` of the peak rates; returns whether the update was left out."""
        finite = math.isfinite(result.loss) and math.isfinite(result.gradient_norm)
        if not finite and self._leave_out(result):
            return True
        limit = self.config.optimizer.clip_norm
        if limit is not None and result.gradient_norm > limit:
            self.pipeline.scale_gradients(limit / (result.gradient_norm + 1e-6))
        set_rate(self.optimizer, part)
        self.optimizer.step()
        return False

    def _leave_out(self, result: StepResult) -> bool:
        """Count a step that is not finite; returns whether the policy leaves its update out."""
        self.progress.non_finite += 1
        policy = self.config.train.non_finite
        found = (
            f"step {self.progress.step + 1}: loss {result.loss:.4g}, gradient norm"
            f" {result.gradient_norm:.4g}"
        )
        if policy == "stop":
            self.stopping, self._fault = True, found
        done = {"skip": "update skipped", "count": "update made", "stop": "stopping"}[policy]
        self.say(f"{found} ({done}; {self.progress.non_finite} so far)")
        return policy != "count"

    def _end_step(self, record: StepRecord) -> None:
        """Evaluate, record, show, call back, save."""
        every = self.config.train.evaluate_every
        if (every and record.step % every == 0) or record.step == self.steps:
            record = replace(record, held_out_loss=self.evaluate())
        if self._metrics is not None:
            self._metrics.write(record)
        self._last = record
        self._display.show(record)
        if record.held_out_loss is not None:
            self.say(f"step {record.step}: held-out loss {record.held_out_loss:.4f}")
        for callback in self.callbacks:
            callback(self, record)
        every = self.config.checkpoint.every
        if every and record.step % every == 0 and self._saved_step != record.step:
            self.save()

    def _finish(self) -> None:
        """The last checkpoint, and every rank's spans of the last step in one file."""
        if self._saved_step != self.progress.step:
            self.save()
        rows = self.pipeline.mesh.world.gather_bytes(json.dumps(self._timeline.as_json()).encode())
        if self.leads:
            found = {
                "format": "terashard-timeline",
                "version": 1,
                "step": self.progress.step,
                "ranks": [json.loads(row) for row in rows],
            }
            replace_text(self.directory.timeline, json.dumps(found) + "\n")

    def _located(self, cause: CommunicationError) -> CommunicationError:
        """``cause`` with this rank, its stage and the step in front, whoever raised it."""
        mesh = self.pipeline.mesh
        rest = str(cause).removeprefix(f"{mesh}, ").removeprefix(f"rank {mesh.rank}, ")
        return CommunicationError(f"{mesh}, after step {self.progress.step}, {rest}")

    def _conclude(self, first: int, seconds: float) -> Literal["finished", "stopped"]:
        """Say how it ended and what to do next."""
        assert self._last is not None
        losses = f"loss {self._last.loss:.4f}"
        if self._last.held_out_loss is not None:
            losses += f", held-out loss {self._last.held_out_loss:.4f}"
        if self.progress.non_finite:
            losses += f"; {self.progress.non_finite} steps were not finite"
        path, step = self.directory.path, self.progress.step
        if step >= self.steps:
            done = f"steps {first} to {step}" if first > 1 else f"{step} steps"
            self.say(f"finished {done} in {show_seconds(seconds)}: {losses}")
            self.say(f"run directory: {path}")
            return "finished"
        self.say(f"stopped after step {step} of {self.steps} and saved: {losses}")
        self.say(f"go on with: {resume_command(self.directory)}")
        return "stopped"
