"""Gradient accumulation in PyTorch: a loop over microbatches that adds to ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torchtrain.batch import DeviceBatch


def microbatches(batch: DeviceBatch, count: int) -> Iterator[DeviceBatch]:
    """Microbatch a of ``count`` holds rows a::count."""
    arrays = batch._asdict().items()
    for index in range(count):
        parts: dict[str, Any] = {name: None if array is None else array[index::count] for name, array in arrays}
        yield batch._replace(**parts)


def accumulate(
    share: Callable[[DeviceBatch], torch.Tensor],
    batch: DeviceBatch,
    count: int,
    parameters: Sequence[nn.Parameter],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, dict[nn.Parameter, torch.Tensor]]:
    """(sum of the shares, its gradients in ``dtype``) over the batch's microbatches.

    ``share`` must be additive over rows: already divided by a count that does not depend on the microbatch. Autograd
    itself adds to ``.grad``, in the parameter's dtype; only where that is not ``dtype`` are there other accumulators.
    """
    apart = [p for p in parameters if p.dtype != dtype]
    sums = {p: torch.zeros_like(p, dtype=dtype, requires_grad=False) for p in apart}
    total: torch.Tensor | None = None
    for microbatch in microbatches(batch, count):
        part = share(microbatch)
        part.backward()
        total = part.detach() if total is None else total + part.detach()
        for parameter, accumulated in sums.items():
            if parameter.grad is not None:
                accumulated += parameter.grad
                parameter.grad = None
    assert total is not None
    return total, {p: p.grad for p in parameters if p.grad is not None} | sums
