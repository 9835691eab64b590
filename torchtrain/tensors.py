"""Named tensors in PyTorch: the values inside the model that remat keeps, offload moves and a trace records.

The names are those of :mod:`shared.policies.remat` for the tensors of a block, and the same in both backends. In
PyTorch a policy sees operations as they happen, so what is named is the operation that gives the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import torch

from shared.recording import take_note

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
    if not torch.compiler.is_compiling():
        take_note(name, value.detach())
    return value
