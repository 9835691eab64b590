"""A batch on PyTorch's device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from shared.batch import Batch


class DeviceBatch(NamedTuple):
    """The arrays of :class:`shared.batch.Batch`; int64, as PyTorch indexes."""

    tokens: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    segments: torch.Tensor | None
    positions: torch.Tensor | None
    rows: torch.Tensor | None
    """int64 [B]: numbers of the rows in the global batch, where dropout needs them."""


def to_device(batch: Batch, device: torch.device, numbered: bool, first_row: int = 0) -> DeviceBatch:
    """Start the transfer; on a GPU it returns at once. ``numbered``: with the rows' numbers, from ``first_row`` on."""

    def place(array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array if array.dtype == np.bool_ else array.astype(np.int64))
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

    return DeviceBatch(
        place(batch.tokens),
        place(batch.targets),
        place(batch.mask),
        None if batch.segments is None else place(batch.segments),
        None if batch.positions is None else place(batch.positions),
        place(first_row + np.arange(batch.num_rows)) if numbered else None,
    )
