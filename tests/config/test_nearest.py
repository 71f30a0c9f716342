"""A refused name is answered with the nearest one and with what is allowed."""

from terashard.config.nearest import alternatives, closest, did_you_mean


def test_the_nearest_name_is_found_and_nothing_far_away() -> None:
    assert closest("stpes", ["tokens", "steps"]) == "steps"
    assert closest("learning", ["tokens", "steps"]) is None
    assert closest("token", ["tokens"], cutoff=0.99) is None


def test_the_question_is_asked_only_if_there_is_something_to_ask() -> None:
    assert did_you_mean("steps", "allowed are steps") == "did you mean steps? allowed are steps"
    assert did_you_mean("steps") == "did you mean steps?"
    assert did_you_mean(None, "see --help") == "see --help"


def test_alternatives_name_the_nearest_first_and_then_all() -> None:
    assert alternatives("stpes", {"tokens": 1, "steps": 2}) == (
        "did you mean steps? allowed are tokens, steps"
    )
    assert alternatives("?", ["a"]) == "allowed are a"
