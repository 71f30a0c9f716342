"""Learning rate as a function of the step alone, so that a resumed run needs no state for it.

With peak rate r, final part f, w steps of warm-up and T steps in all, step s = 0 … T-1:

    warm-up     r (s + 1) / w                       for s < w
    constant    r
    cosine      r (f + (1 - f)(1 + cos πx) / 2)     x from 0 to 1 over the steps after warm-up
    linear      r (1 - (1 - f) x)
    wsd         r, then linear to r f over the last part `decay` of the run (warm-up, stable, decay)
"""

import math

from terashard.config.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of step ``step`` (from 0) of ``steps``."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    match config.schedule:
        case "constant":
            return config.lr
        case "cosine":
            fall = (1 + math.cos(math.pi * _progress(config.warmup, step, steps))) / 2
            return config.lr * (config.final_lr + (1 - config.final_lr) * fall)
        case "linear":
            return _linear(config, _progress(config.warmup, step, steps))
        case "wsd":
            start = max(config.warmup, steps - round(config.decay * steps))
            return _linear(config, _progress(start, step, steps) if step >= start else 0.0)


def _progress(start: int, step: int, steps: int) -> float:
    """From 0 at ``start`` to 1 at the last step."""
    return min(1.0, max(0.0, (step - start) / max(1, steps - 1 - start)))


def _linear(config: OptimizerConfig, progress: float) -> float:
    return config.lr * (1 - (1 - config.final_lr) * progress)
