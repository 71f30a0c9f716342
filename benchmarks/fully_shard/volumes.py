"""How many model volumes a pipeline of token slices moves in a step when everything is held."""

from torch import Tensor, nn

from terashard import Mesh, ModelSpec, Pipeline, Plan, run_threads
from terashard.nn.build import build_stage
from terashard.nn.init import Initialiser
from terashard.plan.plan import spread_layers

SLICES, SHARDS, TOKENS = 16, 2, 64

SPEC = ModelSpec(
    vocab_size=64,
    hidden_size=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    mlp_size=128,
    max_length=TOKENS,
    norm="layer",
    positions="learned",
    activation="gelu",
    bias=True,
)


def volumes_held() -> float:
    """Bytes handed to the backend per step over the model's; 2 is the floor."""
    import torch

    words = torch.randint(0, 64, (1, TOKENS + 1), generator=torch.Generator().manual_seed(0))

    def rank(world, index: int) -> float:  # type: ignore[no-untyped-def]
        mesh = Mesh.of_threads(world, index, shards=SHARDS)
        plan = Plan.uniform(
            sequences=1,
            tokens=TOKENS,
            slices=SLICES,
            shards=SHARDS,
            layers=spread_layers(SPEC.num_layers, 1),
        )
        pipeline = Pipeline(lambda i: _stage(), plan, mesh, fill=Initialiser(SPEC, 0))
        batch: tuple[Tensor, Tensor] = words[:, :-1].contiguous(), words[:, 1:].contiguous()
        pipeline.step(*batch)
        before = pipeline.traffic()
        pipeline.step(*batch)
        after = pipeline.traffic()
        model = sum(p.numel() * 4 for p in pipeline.parameters())
        moved = (
            after.gathered_bytes
            - before.gathered_bytes
            + after.reduced_bytes
            - before.reduced_bytes
        )
        return moved / model

    return round(max(run_threads(SHARDS, rank)), 6)


def _stage() -> nn.Module:
    return build_stage(SPEC, range(SPEC.num_layers), first=True, last=True)
