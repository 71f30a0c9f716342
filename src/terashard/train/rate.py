"""Learning rate as a function of the step alone, so that a resumed run needs no state for it.

The rate of a parameter group is its own peak times a part in [0, 1] that all groups share. With
final part f, w steps of warm-up and T steps in all, step s = 0 … T-1:

    warm-up     (s + 1) / w                     for s < w
    constant    1
    cosine      f + (1 - f)(1 + cos πx) / 2     x from 0 to 1 over the steps after warm-up
    linear      1 - (1 - f) x
    wsd         1, then linear to f over the last part `decay` of the run (warm-up, stable, decay)
"""

import math

from terashard.config.schema import OptimizerConfig


def part_of_peak(config: OptimizerConfig, step: int, steps: int) -> float:
    """The part of every group's peak rate that step ``step`` (from 0) of ``steps`` takes."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    match config.schedule:
        case "constant":
            return 1.0
        case "cosine":
            fall = (1 + math.cos(math.pi * _progress(config.warmup, step, steps))) / 2
            return config.final_lr + (1 - config.final_lr) * fall
        case "linear":
            return _linear(config, _progress(config.warmup, step, steps))
        case "wsd":
            start = max(config.warmup, steps - round(config.decay * steps))
            return _linear(config, _progress(start, step, steps) if step >= start else 0.0)


def _progress(start: int, step: int, steps: int) -> float:
    """From 0 at ``start`` to 1 at the last step."""
    return min(1.0, max(0.0, (step - start) / max(1, steps - 1 - start)))


def _linear(config: OptimizerConfig, progress: float) -> float:
    return 1 - (1 - config.final_lr) * progress
