r"""Initial values by parameter name: the same numbers however layers and rows are split.

Matrices are drawn from ``N(0, 0.02²)``; the two projections that add to the residual stream, whose
variance grows with the number of additions, from ``N(0, 0.02² / 2L)``. Norm weights are one, biases
zero. Every parameter has a generator of its own, seeded by a hash of the seed and the name; the
whole tensor is drawn in float32 on the CPU and cut.

Source: GPT-2 (Radford et al., 2019), section 2.3.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor, nn

from terashard.spec.model import ModelSpec

_STD = 0.02


class Initialiser:
    """Initial values of a model's parameters: a function of seed, global name and shape alone."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self._spec = spec
        self._seed = seed

    def __call__(self, name: str, shape: Sequence[int], rows: tuple[int, int]) -> Tensor:
        """Rows ``[start, stop)`` of parameter ``name`` of shape ``shape``: float32, on the CPU."""
        if self._spec.tied and name == "head.output.weight":
            name = "embed.tokens.weight"
        start, stop = rows
        module, kind = name.split(".")[-2:]
        if kind == "bias":
            return torch.zeros(stop - start, *shape[1:])
        if module.endswith("norm"):
            return torch.ones(stop - start, *shape[1:])
        whole = torch.empty(*shape).normal_(0.0, self._std(name), generator=self._generator(name))
        return whole[start:stop].clone() if stop - start < shape[0] else whole

    def _std(self, name: str) -> float:
        residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
        return _STD / math.sqrt(2 * self._spec.num_layers) if residual else _STD

    def _generator(self, name: str) -> torch.Generator:
        digest = blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def initialise_(
    stage: nn.Module, spec: ModelSpec, seed: int, dtype: torch.dtype = torch.float32
) -> None:
    """Give a stage that was built on meta its initial values, whole, on the CPU: for one process.

    A parameter that two modules share stays shared.
    """
    fill = Initialiser(spec, seed)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in stage.named_modules():
        for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if old not in made:
                value = fill(f"{path}.{name}", old.shape, (0, old.shape[0]))
                made[old] = nn.Parameter(value.to(dtype), requires_grad=old.requires_grad)
            setattr(module, name, made[old])
