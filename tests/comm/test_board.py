"""What ranks tell each other over a store: all hear the same, silence is named, no wait is long."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from terashard.comm.board import Board
from terashard.errors import RunError
from tests.helpers.processes import run_processes

Maker = Callable[[], dist.Store]


@pytest.fixture(params=["hash", "file", "tcp"])
def meeting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Maker]:
    """Makes one rank's end of a store of each kind."""
    if request.param == "hash":
        store = dist.HashStore()
        yield lambda: store
    elif request.param == "file":
        yield lambda: dist.FileStore(str(tmp_path / "meet"), 4)
    else:
        host = dist.TCPStore("127.0.0.1", 0, 4, True, timedelta(seconds=5), wait_for_workers=False)
        yield lambda: dist.TCPStore("127.0.0.1", host.port, 4, False, timedelta(seconds=5))
        del host


def talk(
    make: Maker, function: Callable[[Board], Any], ranks: tuple[int, ...] = (0, 1)
) -> dict[int, Any]:
    """Results, or exceptions, of ``function(board)`` by rank, each rank a thread."""
    told: dict[int, Any] = {}

    def work(rank: int) -> None:
        try:
            told[rank] = function(Board(make(), rank, ranks, name="here"))
        except Exception as error:
            told[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert not any(thread.is_alive() for thread in threads)
    return told


def test_all_hear_what_all_say_as_often_as_they_talk(meeting: Maker) -> None:
    def program(board: Board) -> list[dict[int, str]]:
        return [
            board.exchange(topic, f"{board.rank} {topic} {k}") for k in (0, 1) for topic in "xy"
        ]

    expected = [{r: f"{r} {topic} {k}" for r in (0, 1)} for k in (0, 1) for topic in "xy"]
    assert talk(meeting, program) == {0: expected, 1: expected}


def test_an_empty_text_and_a_long_one_arrive(meeting: Maker) -> None:
    texts = {0: "", 1: "a b c µ " * 2000}
    said = talk(meeting, lambda board: board.exchange("x", texts[board.rank]))
    assert said == {0: texts, 1: texts}


def test_some_ranks_of_a_world_may_have_a_board(meeting: Maker) -> None:
    said = talk(meeting, lambda board: board.exchange("x", str(board.rank)), ranks=(1, 3))
    assert said == {1: {1: "1", 3: "3"}, 3: {1: "1", 3: "3"}}


def test_a_silent_rank_is_missing_after_patience_and_no_later(meeting: Maker) -> None:
    """A FileStore waits in whole seconds; eight silent ranks were waited for one by one."""

    def program(board: Board) -> Any:
        if board.rank > 0:
            return None
        begin = time.monotonic()
        heard = board.exchange("x", "here", patience=0.3)
        return heard, time.monotonic() - begin

    heard, seconds = talk(meeting, program, ranks=tuple(range(9)))[0]
    assert heard == {0: "here"}
    assert 0.25 < seconds < 0.9


def test_agreement_passes_and_disagreement_says_who_said_what(meeting: Maker) -> None:
    def program(board: Board) -> None:
        board.agree("x", "the same")
        board.agree("x", "one thing" if board.rank < 2 else "another")

    told = talk(meeting, program, ranks=(0, 1, 2))
    for error in told.values():
        assert isinstance(error, RunError)
        assert str(error) == "ranks 0, 1: one thing; rank 2: another"


def test_agreement_with_a_silent_rank_names_it(meeting: Maker) -> None:
    def program(board: Board) -> None:
        if board.rank == 0:
            board.agree("x", "here", patience=0.3)

    error = talk(meeting, program)[0]
    assert isinstance(error, RunError)
    assert re.fullmatch(
        r"rank 0: here; rank 1: said nothing for 0\.3 s, so it is doing something else", str(error)
    )


def test_a_silent_rank_is_named_with_what_it_said_before(meeting: Maker) -> None:
    def program(board: Board) -> None:
        for k in range(4 if board.rank == 0 else 3):
            board.agree("x", f"act {k}", patience=0.3 if k == 3 else 5.0)

    error = talk(meeting, program)[0]
    assert isinstance(error, RunError)
    assert re.fullmatch(
        r"rank 0: act 3; rank 1: said nothing .* \(it said before: act 2\)", str(error)
    )


def test_an_empty_text_is_not_silence(meeting: Maker) -> None:
    errors = talk(meeting, lambda board: board.agree("x", "" if board.rank else "here"))
    assert {str(error) for error in errors.values()} == {"rank 0: here; rank 1: "}


def test_who_waits_for_a_rank_that_refused_is_told_why(meeting: Maker) -> None:
    refused = threading.Event()

    def program(board: Board) -> Any:
        if board.rank == 0:
            try:
                board.refuse("unit a came twice")
            finally:
                refused.set()
        before = None if refused.wait(5.0) else "never"
        return before or board.refused()

    told = talk(meeting, program)
    assert isinstance(told[0], RunError)
    assert told[1] == "rank 0 stopped: unit a came twice"


def test_who_heeds_hears_of_a_refusal_long_before_its_patience_ends(meeting: Maker) -> None:
    def program(board: Board) -> Any:
        if board.rank == 0:
            board.refuse("unit a came twice")
        begin = time.monotonic()
        with pytest.raises(RunError, match=r"^rank 0 stopped: unit a came twice$"):
            board.exchange("x", "here", patience=60.0, heeds=True)
        return time.monotonic() - begin

    assert talk(meeting, program)[1] < 2.0


def test_nobody_refused_is_no_word_and_no_long_wait(meeting: Maker) -> None:
    def program(board: Board) -> tuple[str | None, float]:
        begin = time.monotonic()
        return board.refused(), time.monotonic() - begin

    for why, seconds in talk(meeting, program).values():
        assert why is None
        assert seconds < 2.0


def test_old_texts_are_deleted() -> None:
    store = dist.HashStore()

    def program(board: Board) -> None:
        for k in range(30):
            board.exchange("x", str(k))

    talk(lambda: store, program)
    assert store.num_keys() == 4  # the last two of either rank: the other may still read


def test_boards_of_other_names_do_not_hear_each_other() -> None:
    store = dist.HashStore()
    one, other = (Board(store, 0, (0, 1), name=name) for name in ("one", "other"))
    with pytest.raises(RunError):
        one.refuse("not here")
    assert other.refused() is None
    assert other.exchange("x", "a", patience=0.1) == {0: "a"}


def meet(rank: int) -> tuple[dict[int, str], dict[int, str], str]:
    """Two boards of all ranks, of which the second hears nothing of the first; a refusal."""
    first, second = Board.here((0, 1)), Board.here((0, 1))
    heard_first = first.exchange("x", f"first {rank}")
    time.sleep(0.2 * rank)  # rank 0 would find what rank 1 said on the first board
    heard_second = second.exchange("x", f"second {rank}")
    with pytest.raises(RunError) as caught:
        second.agree("y", f"rank {rank}'s own")
    return heard_first, heard_second, str(caught.value)


@pytest.mark.processes
def test_processes_meet_in_the_store_of_their_group() -> None:
    expected = (
        {0: "first 0", 1: "first 1"},
        {0: "second 0", 1: "second 1"},
        "rank 0: rank 0's own; rank 1: rank 1's own",
    )
    assert run_processes(2, meet, timeout=20.0) == [expected, expected]


def test_a_refusal_that_was_given_up_explains_nothing_later(meeting: Maker) -> None:
    """After an error that was caught, every other wait that broke off got its reason."""

    def program(board: Board) -> Any:
        if board.rank == 0:
            with pytest.raises(RunError, match="old"):
                board.refuse("old")
        board.exchange("both have come so far", "")
        old = board.refused()
        board.forget()
        board.exchange("both have forgotten", "")
        heard = board.exchange("x", "now", heeds=True)
        if board.rank == 1:
            with pytest.raises(RunError, match="new"):
                board.refuse("new")
        board.exchange("one has refused again", "")
        return old, heard, board.refused()

    for old, heard, new in talk(meeting, program).values():
        assert old == "rank 0 stopped: old"
        assert heard == {0: "now", 1: "now"}
        assert new == "rank 1 stopped: new"
