"""Errors that are the user's to mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user gave us: one line that says what is wrong, where, and the nearest valid choice.

    Commands print it and exit with status 2; it never reaches the user as a traceback.
    """


class TooSmall(UserError):
    """What the user allows does not hold this much work; a smaller piece of it may fit."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """A hint naming the choice closest to ``word``, or all of them when none is close."""
    choices = sorted(choices)
    close = difflib.get_close_matches(word, choices, n=1)
    if close:
        return f"did you mean '{close[0]}'?"
    return "valid choices: " + ", ".join(choices)
