"""Dropout in PyTorch, by the rule of :mod:`shared.policies.dropout`.

PyTorch has little arithmetic for unsigned integers. In int32 products wrap as they do there, a logical shift is an
arithmetic one whose copies of the sign are masked out, and flipping the sign bit turns one order into the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from shared.policies.dropout import GOLDEN, MULTIPLIERS, SHIFTS, threshold


class Dropout(NamedTuple):
    """Dropout for the rows of one microbatch in one update."""

    update: torch.Tensor
    """Completed updates, 0-d."""
    rows_B: torch.Tensor
    """Numbers of the rows in the global batch."""
    rate: float
    islands: torch.dtype


def drop(x_BTC: torch.Tensor, dropout: Dropout | None, key: tuple[int, int]) -> torch.Tensor:
    """``x`` with elements of each row set to zero, and the others divided by 1 - rate."""
    if dropout is None:
        return x_BTC
    update, rows_B, rate, islands = dropout
    kept_BTC = keep_mask(key, update, rows_B, x_BTC[0].numel(), rate).view(x_BTC.shape)
    scaled_BTC = (x_BTC.to(islands) * (1.0 / (1.0 - rate))).to(x_BTC.dtype)
    return torch.where(kept_BTC, scaled_BTC, 0.0)


def keep_mask(key: tuple[int, int], update: torch.Tensor, rows_B: torch.Tensor, size: int, rate: float) -> torch.Tensor:
    """bool [B, size]; see :func:`shared.policies.dropout.keep_mask`."""
    golden = _signed(GOLDEN)
    k = _mix(update.to(torch.int32) * golden + _signed(key[0]))
    a_B = _mix(rows_B.to(torch.int32) * golden + k)
    b_B = _mix(a_B ^ _signed(key[1]))
    elements_E = torch.arange(size, dtype=torch.int32, device=rows_B.device) * golden
    bits_BE = _mix(elements_E[None] + a_B[:, None]) ^ b_B[:, None]
    return (bits_BE ^ _signed(1 << 31)) >= threshold(rate) - (1 << 31)


def _mix(x: torch.Tensor) -> torch.Tensor:
    for shift, multiplier in zip(SHIFTS[:2], MULTIPLIERS, strict=True):
        x = (x ^ _shifted(x, shift)) * _signed(multiplier)
    return x ^ _shifted(x, SHIFTS[2])


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _signed(value: int) -> int:
    """The int32 with the bits of an unsigned one."""
    return value - (1 << 32) if value >= 1 << 31 else value
