"""Gradient accumulation in PyTorch: a loop over microbatches that adds to ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

Rows = dict[str, torch.Tensor | None]


def microbatches(rows: Rows, count: int) -> Iterator[Rows]:
    """Microbatch a holds rows a::count."""
    for index in range(count):
        yield {name: None if array is None else array[index::count] for name, array in rows.items()}


def accumulate(share: Callable[[Rows], torch.Tensor], rows: Rows, count: int) -> torch.Tensor:
    """Backpropagate every microbatch into ``.grad``; returns the sum of the shares.

    ``share`` must be additive over rows: already divided by a count that does not depend on the microbatch. ``.grad``
    has its parameter's dtype, which is the accumulators' in every precision policy.
    """
    total: torch.Tensor | None = None
    for microbatch in microbatches(rows, count):
        part = share(microbatch)
        part.backward()
        total = part.detach() if total is None else total + part.detach()
    assert total is not None
    return total
