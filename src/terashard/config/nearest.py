"""What a wrong name probably means, and what is allowed: one phrasing for every refusal.

did you mean batch.tokens? allowed are run, model, data
"""

from collections.abc import Iterable


def closest(name: str, allowed: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The allowed name most like ``name``, or None if none is at least ``cutoff`` like it."""
    from difflib import get_close_matches  # only after a mistake

    found = get_close_matches(name, list(allowed), n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(close: str | None, then: str = "") -> str:
    """The question, if there is something to ask, and what is said after it."""
    return f"did you mean {close}? {then}".rstrip() if close else then


def alternatives(name: str, allowed: Iterable[str]) -> str:
    """The nearest of the ``allowed`` names, and all of them."""
    names = list(allowed)
    return did_you_mean(closest(name, names), f"allowed are {', '.join(names)}")
