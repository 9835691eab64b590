"""Named tensors in PyTorch: the values inside the model that remat keeps, offload moves and a trace records.

The names are those of :mod:`shared.policies.remat` for the tensors of a block, and the same in both backends. In
PyTorch a policy sees operations as they happen, so what is named is the operation that gives the tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch

_recording: ContextVar[dict[str, torch.Tensor] | None] = ContextVar("recording", default=None)
_scope: ContextVar[str] = ContextVar("scope", default="")
_operation: ContextVar[str | None] = ContextVar("operation", default=None)


def named(name: str, operation: Callable[..., torch.Tensor], *inputs: torch.Tensor | None) -> torch.Tensor:
    """What the operation gives, known by that name to remat and offload policies."""
    if torch.compiler.is_compiling():
        return operation(*inputs)
    token = _operation.set(name)
    try:
        return operation(*inputs)
    finally:
        _operation.reset(token)


def operation_name() -> str | None:
    """The name of what is being computed, inside :func:`named`."""
    return _operation.get()


def record(name: str, value: torch.Tensor) -> torch.Tensor:
    """``value``, after a recording has taken note of it."""
    if torch.compiler.is_compiling():
        return value
    recording = _recording.get()
    if recording is not None:
        recording[_scope.get() + name] = value.detach()
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
def recorded() -> Iterator[dict[str, torch.Tensor]]:
    """Collects, in the order in which the model computes them, the values that are recorded inside."""
    values: dict[str, torch.Tensor] = {}
    token = _recording.set(values)
    try:
        yield values
    finally:
        _recording.reset(token)
