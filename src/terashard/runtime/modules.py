"""The modules of a stage: where they come from, what is done to them, in which mode they are."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from terashard.errors import PlanError
from terashard.nn.linear import Stash, stash_linears
from terashard.nn.protocols import StageModule
from terashard.shard.unit import ShardUnit

StageFactory = Callable[[int], StageModule]


def module_of(stages: StageFactory | StageModule, index: int) -> StageModule:
    """This rank's module; a class is a function from index to module, whatever else it has."""
    if isinstance(stages, StageModule) and not isinstance(stages, type):
        return stages
    module = stages(index)
    if not isinstance(module, StageModule):
        raise PlanError(
            f"stage {index} is a {type(module).__name__}, which is no StageModule; give it width,"
            " units(), has_head() and ties()"
        )
    return module


def stashes_of(module: StageModule) -> dict[nn.Module, Stash]:
    """Linear layers that put aside what their weights' gradients need, but for the head's."""
    units = module.units()
    return stash_linears([unit for _, unit in (units[:-1] if module.has_head() else units)])


@contextmanager
def evaluating(units: Sequence[ShardUnit]) -> Iterator[None]:
    """The modules of ``units`` in evaluation mode: no dropout, and no random number drawn."""
    modes = [(module, module.training) for unit in units for module in unit.module.modules()]
    for unit in units:
        unit.module.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
