"""From a unit on meta to its shard, filled by a function that is passed in.

Initialising, importing and restoring are three such functions, so nothing here knows where values
come from. One unit after the other, and inside it one parameter after the other, asks only for the
rows that this rank keeps: what a ``fill`` holds at a time is at most one full parameter.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from terashard.errors import RunError
from terashard.shard.unit import ShardUnit, UnitState

Fill = Callable[[str, torch.Size, tuple[int, int]], Tensor]
"""(global name, full shape, rows [start, stop) of dim 0) → these rows, in any floating-point type.

Of a 0-dim tensor, asked for as rows [0, 1), all is returned.
"""


def materialise(unit: ShardUnit, fill: Fill) -> None:
    """Write the unit's shard, and its module's buffers on meta, with what ``fill`` returns.

    The unit must not be gathered. May be called again, to restore other values. Raises ``RunError``
    naming the tensor if ``fill`` returns another shape than it was asked for; whatever ``fill``
    itself raises passes through.
    """
    if unit.state is not UnitState.SHARDED:
        raise RunError(
            f"unit {unit.name} is {unit.state.name} and cannot be written; release it first"
        )
    unit.rewritten()
    for parameter in unit.parameters:
        if parameter.local.numel():
            rows = fill(parameter.name, parameter.shape, parameter.rows)
            parameter.local.copy_(_checked(parameter.name, rows, parameter.local_shape))
        parameter.written = True
    for name, module, attribute, buffer in _meta_buffers(unit):
        value = fill(name, buffer.shape, (0, buffer.shape[0] if buffer.dim() else 1))
        value = _checked(name, value, buffer.shape)
        module._buffers[attribute] = value.to(unit.axes.device, buffer.dtype, copy=True)


def require_written(units: Sequence[ShardUnit]) -> None:
    """Refuse, by name, a parameter that was never written or a buffer that is still on meta."""
    for unit in units:
        for parameter in unit.parameters:
            parameter.require_written()
        for name, *_ in _meta_buffers(unit):
            raise RunError(
                f"buffer {name} was built on meta and never written; materialise its unit first"
            )


def _checked(name: str, value: Tensor, shape: torch.Size) -> Tensor:
    if value.shape != shape or value.is_meta:
        found = "a tensor on meta" if value.is_meta else f"shape {tuple(value.shape)}"
        raise RunError(
            f"{name} was to be filled with values of shape {tuple(shape)}, and {found} came"
        )
    return value.detach()


def _meta_buffers(unit: ShardUnit) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    for prefix, module in unit.module.named_modules(prefix=unit.name):
        for attribute, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                yield f"{prefix}.{attribute}", module, attribute, buffer
