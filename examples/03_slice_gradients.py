"""Cut a sequence into slices by hand, run them forward and back, and compare with the whole.

One layer, float64. Each slice sees the keys and values of all slices before it through a carry;
running back from the last slice to the first, the carry hands every slice what later slices owe
its keys and values.
"""

import torch

from terashard.nn.build import build_stage
from terashard.nn.init import initialise_
from terashard.nn.protocols import TokenSlice
from terashard.spec.model import ModelSpec

spec = ModelSpec(
    vocab_size=11,
    hidden_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=64,
    max_length=12,
)
stage = build_stage(spec, range(1), first=True, last=True)
initialise_(stage, spec, seed=0, dtype=torch.float64)
layer = dict(stage.units())["layers.0"]
x = torch.randn(2, 12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def gradients(cut: list[int]) -> list[torch.Tensor]:
    """Gradients of the layer's parameters for the loss Σ y², cut into slices of these lengths."""
    layer.zero_grad()
    carry = layer.new_carry(2, 12, device=x.device, dtype=x.dtype)
    outputs, start = [], 0
    for index, length in enumerate(cut):
        where = TokenSlice(index=index, start=start, stop=start + length, total=12)
        outputs.append(layer(x[:, start : start + length], carry, where))
        start += length
    for index, y in reversed(list(enumerate(outputs))):
        y.backward(2 * y.detach())
        carry.forget(index)
    return [p.grad.clone() for p in layer.parameters()]


if __name__ == "__main__":
    whole = gradients([12])
    for cut in ([6, 6], [5, 1, 4, 2], [1] * 12):
        error = max(
            float((a - b).abs().max() / b.abs().max())
            for a, b in zip(gradients(cut), whole, strict=True)
        )
        print(f"slices {cut}: largest relative error of any gradient {error:.1e}")
        assert error < 1e-10
