"""Gradient accumulation in PyTorch: a loop over microbatches that adds to ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchtrain.batch import DeviceBatch


def microbatches(batch: DeviceBatch, count: int) -> Iterator[DeviceBatch]:
    """Microbatch a of ``count`` holds rows a::count."""
    arrays = batch._asdict().items()
    for index in range(count):
        parts: dict[str, Any] = {name: None if array is None else array[index::count] for name, array in arrays}
        yield batch._replace(**parts)


def accumulate(share: Callable[[DeviceBatch], torch.Tensor], batch: DeviceBatch, count: int) -> torch.Tensor:
    """Backpropagate every microbatch into ``.grad``; returns the sum of the shares.

    ``share`` must be additive over rows: already divided by a count that does not depend on the microbatch. ``.grad``
    has its parameter's dtype, which is the accumulators' in every precision policy.
    """
    total: torch.Tensor | None = None
    for microbatch in microbatches(batch, count):
        part = share(microbatch)
        part.backward()
        total = part.detach() if total is None else total + part.detach()
    assert total is not None
    return total
