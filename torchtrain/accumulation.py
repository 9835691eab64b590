"""Gradient accumulation in PyTorch: a loop over microbatches that adds to ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from torchtrain.batch import DeviceBatch


def microbatches(batch: DeviceBatch, count: int) -> Iterator[DeviceBatch]:
    """Microbatch a of ``count`` holds rows a::count."""
    for index in range(count):
        yield DeviceBatch(
            tokens=batch.tokens[index::count],
            targets=batch.targets[index::count],
            mask=batch.mask[index::count],
            segments=None if batch.segments is None else batch.segments[index::count],
            positions=None if batch.positions is None else batch.positions[index::count],
        )


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
