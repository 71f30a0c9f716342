"""From numbers to a stage's module, on the meta device: names and shapes, no storage.

Values come later, unit by unit and shard by shard (``init.py``, an import, a checkpoint).
"""

from terashard.errors import PlanError
from terashard.nn.decoder import DecoderStage
from terashard.spec.model import ModelSpec


def build_stage(spec: ModelSpec, layers: range, *, first: bool, last: bool) -> DecoderStage:
    """Layers ``layers`` of a decoder; ``first`` adds the embedding, ``last`` the head."""
    if layers.step != 1 or layers.start < 0 or layers.stop > spec.num_layers:
        raise PlanError(
            f"a stage of layers {layers} was asked for, but the model has layers"
            f" 0 to {spec.num_layers - 1}; a stage is a consecutive run of them"
        )
    return DecoderStage(spec, layers, ends=(first, last), device="meta")
