"""Dynamic loss scaling in PyTorch, by the rule of :class:`shared.config.precision.LossScale`.

``torch.amp.GradScaler`` follows the same rule but reads the overflow flag on the host in every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.config.schema import LossScale


@dataclass
class LossScaleState:
    """The scale, and how many good updates in a row it has seen."""

    scale: torch.Tensor
    good_updates: torch.Tensor


def initial(rule: LossScale | None, device: torch.device) -> LossScaleState | None:
    """The state before the first step; None without loss scaling."""
    if rule is None:
        return None
    return LossScaleState(
        torch.tensor(rule.initial, dtype=torch.float32, device=device),
        torch.tensor(0, dtype=torch.int32, device=device),
    )


def update(state: LossScaleState | None, finite: torch.Tensor, rule: LossScale | None) -> None:
    """Advance the state in place after a step whose gradients were all finite, or not."""
    if state is None or rule is None:
        return
    good = torch.where(finite, state.good_updates + 1, 0)
    grow = good >= rule.growth_interval
    grown = torch.where(grow, state.scale * rule.growth, state.scale)
    state.scale = torch.where(finite, grown, state.scale * rule.backoff)
    state.good_updates = torch.where(grow, 0, good)
