"""What a decoder is, in numbers: enough to count, plan and build it.

One decoder covers two families. Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU,
no biases. GPT-2: LayerNorm, learned positions, GELU, biases. Parameter names are the same in both
where they mean the same.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

from terashard.config.schema import ModelConfig
from terashard.errors import PlanError

_SIZES = (
    *("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads"),
    *("mlp_size", "max_length", "head_dim"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only Transformer. Sizes are in elements."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    mlp_size: int
    max_length: int
    head_dim: int
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    positions: Literal["rotary", "learned"] = "rotary"
    rope_theta: float = 10_000.0
    activation: Literal["swiglu", "gelu"] = "swiglu"
    bias: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes that no decoder can have."""
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise PlanError(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise PlanError(
                f"model.num_kv_heads = {self.num_kv_heads} does not divide model.num_heads ="
                f" {self.num_heads}; every key/value head must serve the same number of query heads"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise PlanError(
                f"model.head_dim is {self.head_dim}; rotary positions need an even number"
            )

    def unit_names(self) -> tuple[str, ...]:
        """Names of the units (parameters that travel together) from the first to the last."""
        return ("embed", *(f"layers.{i}" for i in range(self.num_layers)), "head")

    def unit_parameters(self, unit: str) -> dict[str, tuple[int, ...]]:
        """Global name → shape of every parameter of ``unit``.

        Under ``tied`` the head's weight is the embedding's, and listed there alone.
        """
        width = self.hidden_size
        shapes: dict[str, tuple[int, ...]]
        if unit == "embed":
            shapes = {"tokens.weight": (self.vocab_size, width)}
            if self.positions == "learned":
                shapes["positions.weight"] = (self.max_length, width)
        elif unit == "head":
            shapes = self._norm("norm")
            if not self.tied:
                shapes["output.weight"] = (self.vocab_size, width)
        else:
            shapes = self._layer()
        return {f"{unit}.{name}": shape for name, shape in shapes.items()}

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Global name → shape of every parameter of the model, tied weights once."""
        return {n: s for unit in self.unit_names() for n, s in self.unit_parameters(unit).items()}

    def num_parameters(self) -> int:
        """How many numbers the model learns, tied weights once."""
        return sum(map(prod, self.parameters().values()))

    def _norm(self, name: str) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (self.hidden_size,)}
        if self.norm == "layer":
            shapes[f"{name}.bias"] = (self.hidden_size,)
        return shapes

    def _linear(self, name: str, out: int, inputs: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (out, inputs)}
        if self.bias:
            shapes[f"{name}.bias"] = (out,)
        return shapes

    def _layer(self) -> dict[str, tuple[int, ...]]:
        width, mlp = self.hidden_size, self.mlp_size
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes = self._norm("attention_norm")
        shapes |= self._linear("attention.query", query, width)
        shapes |= self._linear("attention.key", key, width)
        shapes |= self._linear("attention.value", key, width)
        shapes |= self._linear("attention.output", width, query)
        shapes |= self._norm("mlp_norm")
        if self.activation == "swiglu":
            shapes |= self._linear("mlp.gate", mlp, width)
        shapes |= self._linear("mlp.up", mlp, width)
        shapes |= self._linear("mlp.down", width, mlp)
        return shapes


def describe(config: ModelConfig, *, vocab_size: int, max_length: int) -> ModelSpec:
    """The model that ``config`` describes.

    What it left open is filled in: ``vocab_size`` from the data, ``max_length`` from the batch.
    """
    llama = config.family == "llama"
    if config.head_dim is None and config.hidden_size % config.num_heads:
        raise PlanError(
            f"model.hidden_size = {config.hidden_size} is no multiple of model.num_heads ="
            f" {config.num_heads}; change one of them, or give model.head_dim"
        )
    if config.vocab_size is not None and config.vocab_size < vocab_size:
        raise PlanError(
            f"model.vocab_size is {config.vocab_size}, but the data has {vocab_size} tokens in its"
            " vocabulary; leave model.vocab_size out, or make it at least that"
        )
    longest = config.max_length or max_length
    if longest < max_length:
        raise PlanError(
            f"model.max_length is {longest}, shorter than batch.tokens = {max_length}; leave"
            " model.max_length out, or make it at least that"
        )
    mlp = 64 * round(config.hidden_size * 8 / 3 / 64) if llama else 4 * config.hidden_size
    return ModelSpec(
        vocab_size=config.vocab_size or vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads or config.num_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_heads,
        mlp_size=config.mlp_size or max(64, mlp),
        max_length=longest,
        norm="rms" if llama else "layer",
        norm_eps=config.norm_eps,
        positions="rotary" if llama else "learned",
        rope_theta=config.rope_theta,
        activation="swiglu" if llama else "gelu",
        bias=not llama,
        tied=config.tied,
    )
