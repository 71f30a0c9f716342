"""What a user asks of a run: frozen sections, each checked at birth, field by field.

A check that needs one field stands here. What must fit between sections (slices against tokens,
stages against layers) is checked where the fitting is done, in ``plan``. Strings become types in
``load.py`` only. The string under a field is its help text.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from terashard.errors import ConfigError


def _at_least(section: str, name: str, value: float, least: float) -> None:
    if value < least:
        raise ConfigError(f"{section}.{name} is {value}; it must be at least {least:g}")


def _above_zero(section: str, of: object, *names: str, otherwise: str = "") -> None:
    for name in names:
        value = getattr(of, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{section}.{name} is {value}; it must be above 0{otherwise}")


def _positive(section: str, of: object, *names: str) -> None:
    for name in names:
        value = getattr(of, name)
        if value is not None:
            _at_least(section, name, value, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The decoder to train."""

    family: Literal["llama", "gpt2"] = "llama"
    """llama: RMSNorm, rotary, SwiGLU; gpt2: LayerNorm, learned positions, GELU, biases."""
    vocab_size: int | None = None
    """Size of the vocabulary; by default what the data says."""
    hidden_size: int = 256
    """Channels of the residual stream."""
    num_layers: int = 4
    """Transformer layers."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int | None = None
    """Key/value heads; by default as many as query heads."""
    head_dim: int | None = None
    """Channels of one head; by default hidden_size / num_heads."""
    mlp_size: int | None = None
    """Inner width of the MLP; by default 4 (gpt2) or about 8/3 (llama) x hidden_size."""
    max_length: int | None = None
    """Longest sequence that learned positions know; by default batch.tokens."""
    tied: bool = False
    """Whether the output head shares the embedding's weights."""
    norm_eps: float = 1e-5
    """Added to the variance in every norm."""
    rope_theta: float = 10_000.0
    """Base of the rotary positions."""

    def __post_init__(self) -> None:
        """Check every size that was given."""
        _positive("model", self, "vocab_size", "hidden_size", "num_layers", "num_heads")
        _positive("model", self, "num_kv_heads", "head_dim", "mlp_size", "max_length")
        _above_zero("model", self, "norm_eps", "rope_theta")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Prepared token folders (made by `terashard data prepare`)."""

    train: str = ""
    """Folder of the training tokens."""
    validation: str = ""
    """Folder of the held-out tokens; empty: the last `held_out` part of the training tokens."""
    held_out: float = 0.02
    """Part of the training tokens held out when no validation folder is named; may be 0."""
    shuffle: bool = True
    """Draw sequences in a random order, new in every epoch, that depends on run.seed only."""

    def __post_init__(self) -> None:
        """Check the held-out part."""
        if not 0.0 <= self.held_out < 1.0:
            raise ConfigError(f"data.held_out is {self.held_out}; it must lie in [0, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """How many tokens one step sees."""

    sequences: int = 8
    """Sequences per step, over all data-parallel ranks."""
    tokens: int = 256
    """Tokens per sequence."""

    def __post_init__(self) -> None:
        """Check both counts."""
        _positive("batch", self, "sequences", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the work is cut: replicas x stages x shards processes, micro-batches x token slices."""

    stages: int = 1
    """Pipeline stages."""
    shards: int = 1
    """Ranks over which parameters, gradients and optimizer state of a stage are cut."""
    replicas: int = 1
    """Copies of the whole sharded pipeline."""
    order: Literal["fill_drain", "one_forward_one_backward"] = "one_forward_one_backward"
    """Order of the cells: all forwards then all backwards, or one forward one backward."""
    micro_batches: int = 1
    """Equal micro-batches of one data-parallel rank's sequences; unused with `partition`."""
    slices: tuple[int, ...] = (1,)
    """One number: equal token slices; several: their lengths. Unused with `partition`."""
    partition: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Micro-batches as (sequences, slice lengths), e.g. [[2, [128, 128]], [1, [256]]]."""
    residency: int | None = None
    """Bytes of full parameters that a rank with several shards may hold; none: its whole stage."""
    reduce: Literal["step", "micro_batch", "stash"] = "step"
    """What is summed over shards: full gradients, per step or micro-batch; or a stash's, once."""

    def __post_init__(self) -> None:
        """Check every count."""
        _positive("parallel", self, "stages", "shards", "replicas", "micro_batches")
        if not self.slices:
            raise ConfigError("parallel.slices is empty; give a number of slices or their lengths")
        for value in self.slices:
            _at_least("parallel", "slices", value, 1)
        for sequences, lengths in self.partition:
            _at_least("parallel", "partition (sequences)", sequences, 1)
            for value in lengths:
                _at_least("parallel", "partition (slice length)", value, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Optimizer options of the parameters whose global name matches a pattern."""

    match: str
    """A shell-style pattern over global names, e.g. "layers.*.mlp.*"; the first match wins."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options for these parameters, e.g. {lr = 1e-4, weight_decay = 0.0}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Which optimizer, and how it is set."""

    name: str = "AdamW"
    """Any class of torch.optim that works element by element."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Weight decay of matrices; norms and biases have none."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer, but lr and weight_decay: {betas = [0.9, 0.95]}."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameter groups by pattern, tried in order."""
    clip_norm: float | None = 1.0
    """Gradients are scaled down to this norm over all parameters; none: never."""
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """Learning rate after warm-up; wsd: stable, then a linear decay over `decay`."""
    warmup: int = 0
    """Steps of linear warm-up from 0."""
    final_lr: float = 0.1
    """Last learning rate, as a part of `lr`."""
    decay: float = 0.2
    """Part of the run that wsd decays over."""

    def __post_init__(self) -> None:
        """Check rates and parts."""
        for name in ("lr", "weight_decay", "warmup"):
            _at_least("optimizer", name, getattr(self, name), 0)
        for name in {"lr", "weight_decay"} & self.options.keys():
            raise ConfigError(
                f"optimizer.options has {name} = {self.options[name]}; write it as"
                f" optimizer.{name}, or into a group's options"
            )
        _above_zero("optimizer", self, "clip_norm", otherwise=", or none")
        for name in ("final_lr", "decay"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(
                    f"optimizer.{name} is {getattr(self, name)}; it must lie in [0, 1]"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Cross-entropy and its variants."""

    chunk_tokens: int = 1024
    """Tokens (sequences x positions) whose logits exist at one time."""
    ignore_index: int = -100
    """Targets with this value count for nothing."""
    label_smoothing: float = 0.0
    """Part of every target that is spread over the vocabulary."""
    z_loss: float = 0.0
    """Weight of the squared log-partition."""
    soft_cap: float | None = None
    """Logits become cap x tanh(logits / cap)."""

    def __post_init__(self) -> None:
        """Check ranges."""
        _at_least("loss", "chunk_tokens", self.chunk_tokens, 1)
        _at_least("loss", "z_loss", self.z_loss, 0)
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ConfigError(
                f"loss.label_smoothing is {self.label_smoothing}; it must lie in [0, 1)"
            )
        _above_zero("loss", self, "soft_cap", otherwise=", or none")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long (one of steps, tokens, epochs), how precisely, and what to look at on the way."""

    steps: int | None = None
    """Length of the run in steps."""
    tokens: int | None = None
    """Length of the run in tokens; rounded up to whole steps."""
    epochs: float | None = None
    """Length of the run in passes over the training sequences; rounded up to whole steps."""
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    """Type of gathered units and computation; shards, optimizer and sums stay float32 in bf16."""
    non_finite: Literal["skip", "count", "stop"] = "skip"
    """NaN or infinity in loss or gradient norm: skip the update, count it, or save and stop."""
    evaluate_every: int = 0
    """Steps between evaluations on held-out data; 0: only at the end."""
    evaluate_batches: int = 8
    """Batches of one evaluation."""
    log_every: int = 10
    """Steps between plain log lines when the output is no terminal."""
    callbacks: tuple[str, ...] = ()
    """Callbacks as "module:name", called with the trainer and the record of every step."""

    def __post_init__(self) -> None:
        """Check lengths."""
        given = [n for n in ("steps", "tokens", "epochs") if getattr(self, n) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"train.{' and train.'.join(given)} are given; a run has one length: keep one"
            )
        _above_zero("train", self, "steps", "tokens", "epochs")
        _at_least("train", "evaluate_every", self.evaluate_every, 0)
        _at_least("train", "evaluate_batches", self.evaluate_batches, 1)
        _at_least("train", "log_every", self.log_every, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, and how many stay."""

    every: int = 0
    """Steps between checkpoints; 0: only at the end and when the run is stopped."""
    keep: int = 2
    """How many complete checkpoints are kept."""

    def __post_init__(self) -> None:
        """Check both counts."""
        _at_least("checkpoint", "every", self.every, 0)
        _at_least("checkpoint", "keep", self.keep, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """The run itself: where it writes, its seed, its processes."""

    directory: str = ""
    """Run directory; must not exist yet. Empty: runs/<name of the run file>-<date>-<time>."""
    seed: int = 0
    """Initial values and the order of the data depend on it, and on nothing else."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one for every local process, else cpu."""
    threads: int | None = None
    """Threads of one process; by default the machine's cores over its processes."""
    timeout: float = 120.0
    """Seconds that a rank waits for another before it gives up."""
    shutdown_timeout: float = 300.0
    """Seconds that a stopping run may take to save."""

    def __post_init__(self) -> None:
        """Check times and threads."""
        _above_zero("run", self, "timeout", "shutdown_timeout")
        _positive("run", self, "threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything a run file may say, section by section."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
