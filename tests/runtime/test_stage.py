"""A stage refuses a wrong order, hands on what it promised, and keeps nothing."""

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from terashard.errors import RunError
from terashard.nn.protocols import Carry, TokenSlice
from terashard.runtime.stage import Stage
from terashard.schedule.actions import Action, Backward, Cell, Forward, Grid, MicroBatch
from terashard.schedule.lower import insert_sharding, split_at_units
from terashard.schedule.orders import fill_drain, forward_only
from terashard.schedule.schedule import Schedule, Unit
from tests.helpers.models import WIDTH, Plain, Recurrent, UserStage, user_loss

GRID = Grid(ranks=2, partition=(MicroBatch(2, (2, 1, 3)),))
UNITS = ((Unit("a"), Unit("b")),) * 2


def _schedule(*, cut: bool = False, training: bool = True) -> Schedule:
    bare = fill_drain(GRID) if training else forward_only(GRID)
    cells = [cell for stage in range(2) for cell in GRID.cells(stage)]
    return insert_sharding(split_at_units(bare, dict.fromkeys(cells, (1,)) if cut else {}), UNITS)


class _Numbers(nn.Module):
    """The first unit of stage 0, whose tokens are numbers here: [B, n] → [B, n, C]."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, carry: Carry | None, where: TokenSlice) -> Tensor:
        return x.unsqueeze(-1) * self.scale


def _stage(index: int = 0, units: Sequence[nn.Module] | None = None, width: int = WIDTH) -> Stage:
    made = units or (_Numbers(), Recurrent())
    named = list(zip(("a", "b"), made, strict=True))
    kwargs = {"device": torch.device("cpu"), "dtype": torch.float64}
    for _, unit in named:
        unit.to(torch.float64)
    return Stage(UserStage(named, width), index, **kwargs)


def _begin(stage: Stage, schedule: Schedule) -> None:
    tokens = torch.arange(12, dtype=torch.float64).view(2, 6)
    stage.begin(schedule, tokens, tokens, user_loss)


def _perform(stage: Stage, actions: Sequence[Action]) -> list[Tensor | None]:
    found = []
    for action in actions:
        if isinstance(action, Forward):
            found.append(stage.forward(action, None))
        else:
            assert isinstance(action, Backward)
            top = action.segment == stage._plan.segments(action.cell) - 1
            shape = stage.input_shape(action.cell)
            dy = torch.ones(shape, dtype=torch.float64) if top else None
            found.append(stage.backward(action, dy))
    return found


def _f(index: int, segment: int = 0) -> Forward:
    return Forward(Cell(0, 0, index), segment)


def _b(index: int, segment: int = 0) -> Backward:
    return Backward(Cell(0, 0, index), segment)


WRONG = {
    "a slice twice": ([_f(0), _f(0)], "F0.0.0 came when slice 1, segment 0"),
    "a slice left out": ([_f(0), _f(2)], "F0.0.2 came when slice 1, segment 0"),
    "backward before the last forward": ([_f(0), _f(1), _b(1)], "B0.0.1 came when none was due"),
    "backward from the first slice": (
        [_f(0), _f(1), _f(2), _b(0)],
        "B0.0.0 came when slice 2, segment 0 was due",
    ),
    "backward twice": (
        [_f(0), _f(1), _f(2), _b(2), _b(2)],
        "B0.0.2 came when slice 1, segment 0 was due",
    ),
    "one backward too many": (
        [_f(0), _f(1), _f(2), _b(2), _b(1), _b(0), _b(0)],
        "B0.0.0 came when none was due",
    ),
}


@pytest.mark.parametrize(("actions", "message"), WRONG.values(), ids=WRONG)
def test_any_other_order_is_refused_in_a_sentence(actions: list[Action], message: str) -> None:
    stage = _stage()
    _begin(stage, _schedule())
    with pytest.raises(RunError, match=message):
        _perform(stage, actions)


def test_segments_run_upward_forward_and_downward_back() -> None:
    stage = _stage()
    _begin(stage, _schedule(cut=True))
    with pytest.raises(RunError, match=r"F0\.0\.1 came when slice 0, segment 1"):
        _perform(stage, [_f(0, 0), _f(1, 0)])
    _begin(stage, _schedule(cut=True))
    forward = [_f(t, k) for t in range(3) for k in range(2)]
    with pytest.raises(RunError, match=r"B0\.0\.2 came when slice 2, segment 1 was due"):
        _perform(stage, [*forward, _b(2, 0)])


def test_segments_change_no_gradient() -> None:
    found = []
    for cut in (False, True):
        stage, schedule = _stage(), _schedule(cut=cut)
        for unit in stage.units:
            for parameter in unit.parameters():
                nn.init.constant_(parameter, 0.1)
        _begin(stage, schedule)
        _perform(stage, [a for a in schedule.actions(0) if isinstance(a, Forward | Backward)])
        found.append([p.grad for unit in stage.units for p in unit.parameters()])
    for whole, cut_up in zip(*found, strict=True):
        torch.testing.assert_close(cut_up, whole, rtol=1e-14, atol=1e-14)


def test_nothing_is_performed_outside_a_step() -> None:
    stage = _stage()
    with pytest.raises(RunError, match="no step is going on"):
        stage.forward(_f(0), None)
    _begin(stage, _schedule())
    stage.end()
    with pytest.raises(RunError, match="no step is going on"):
        stage.forward(_f(0), None)


def test_an_output_of_another_width_is_refused_where_it_is_made() -> None:
    stage = _stage(width=8)
    _begin(stage, _schedule())
    with pytest.raises(RunError, match=r"\[2, 2, 16\] in cell 0\.0\.0, but hands on .*\[2, 2, 8\]"):
        stage.forward(_f(0), None)


def test_an_output_of_another_type_is_refused_where_it_is_made() -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor, carry: Carry | None, where: TokenSlice) -> Tensor:
            return x.float()

    stage = _stage(units=(_Numbers(), Half()))
    _begin(stage, _schedule())
    with pytest.raises(RunError, match=r"float32 .* but hands on torch\.float64"):
        stage.forward(_f(0), None)


def test_a_slice_that_ran_backward_holds_no_graph() -> None:
    kept: list[weakref.ref[Tensor]] = []

    class Keeping(Plain):
        def forward(self, x: Tensor, carry: Carry | None, where: TokenSlice) -> Tensor:
            y = super().forward(x, carry, where)
            kept.append(weakref.ref(y))
            return y * 1.0

    stage = _stage(units=(_Numbers(), Keeping()))
    _begin(stage, _schedule())
    forward, backward = [_f(t) for t in range(3)], [_b(t) for t in (2, 1, 0)]
    _perform(stage, forward)
    gc.collect()
    for alive, action in zip((2, 1, 0), backward, strict=True):
        _perform(stage, [action])
        assert len(stage._micros[0].graphs) == alive
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3


def test_evaluation_lets_carries_go_with_the_last_slice() -> None:
    stage = _stage()
    _begin(stage, _schedule(training=False))
    _perform(stage, [_f(0), _f(1)])
    assert stage._micros[0].carries
    _perform(stage, [_f(2)])
    assert not stage._micros[0].carries
    assert not stage._micros[0].graphs
