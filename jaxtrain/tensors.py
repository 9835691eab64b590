"""Named tensors in JAX: the values inside the model that remat keeps, offload moves and a trace records.

The names are those of :mod:`shared.policies.remat` for the tensors of a block, and the same in both backends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
from jax.ad_checkpoint import checkpoint_name

_recording: ContextVar[dict[str, jax.Array] | None] = ContextVar("recording", default=None)
_scope: ContextVar[str] = ContextVar("scope", default="")


def named(name: str, value: jax.Array) -> jax.Array:
    """``value``, known by that name to remat and offload policies; recorded if somebody records."""
    return checkpoint_name(record(name, value), name)


def record(name: str, value: jax.Array) -> jax.Array:
    """``value``, after a recording has taken note of it."""
    recording = _recording.get()
    if recording is not None:
        recording[_scope.get() + name] = value
    return value


@contextlib.contextmanager
def scope(prefix: str) -> Iterator[None]:
    """What is recorded inside carries the prefix."""
    token = _scope.set(f"{_scope.get()}{prefix}.")
    try:
        yield
    finally:
        _scope.reset(token)


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, jax.Array]]:
    """Collects, in the order in which the model computes them, the values that are recorded inside.

    Inside a jitted function they are tracers, to be returned by it; layers must be unrolled, not scanned.
    """
    values: dict[str, jax.Array] = {}
    token = _recording.set(values)
    try:
        yield values
    finally:
        _recording.reset(token)
