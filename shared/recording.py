"""Values inside a model, taken note of under names while somebody records; at all other times a look at a variable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

_recording: ContextVar[dict[str, Any] | None] = ContextVar("recording", default=None)
_scope: ContextVar[str] = ContextVar("scope", default="")


def take_note(name: str, value: Any) -> None:
    """Keep the value under its name, if somebody records."""
    recording = _recording.get()
    if recording is not None:
        recording[_scope.get() + name] = value


@contextlib.contextmanager
def scope(prefix: str) -> Iterator[None]:
    """Names inside carry the prefix, and a dot."""
    token = _scope.set(f"{_scope.get()}{prefix}.")
    try:
        yield
    finally:
        _scope.reset(token)


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, Any]]:
    """Collects what is noted inside, in that order."""
    values: dict[str, Any] = {}
    token = _recording.set(values)
    try:
        yield values
    finally:
        _recording.reset(token)
