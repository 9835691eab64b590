"""Cross entropy in PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def cross_entropy_sum(
    logits_BTV: torch.Tensor, targets_BT: torch.Tensor, mask_BT: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Sum over valid positions of -log softmax(logits)[target], in nats; the logits are raised to ``dtype`` first."""
    loss_N = F.cross_entropy(logits_BTV.to(dtype).flatten(0, 1), targets_BT.flatten(), reduction="none")
    return torch.where(mask_BT.flatten(), loss_N, 0.0).sum()
