"""What a run of PyTorch carries from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torchtrain.loss_scale import LossScaleState
from torchtrain.models.transformer import Transformer
from torchtrain.optimizer import Optimizer


@dataclass
class TrainState:
    """Everything that an update changes."""

    model: Transformer
    optimizer: Optimizer
    average: dict[str, torch.Tensor] | None
    rate: torch.Tensor
    num_updates: torch.Tensor
    loss_scale: LossScaleState | None

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.model.parameters())


def tensors(state: TrainState) -> dict[str, Any]:
    """All tensors of the state under flat names; filling them in place restores it."""
    found: dict[str, Any] = {"num_updates": state.num_updates}
    for name, parameter in state.model.named_parameters():
        found[f"parameters.{name}"] = parameter.detach()
        for kind, moment in state.optimizer.moments[parameter].items():
            found[f"optimizer.{kind}.{name}"] = moment
        if state.average is not None:
            found[f"average.{name}"] = state.average[name]
    if state.loss_scale is not None:
        found["loss_scale.scale"] = state.loss_scale.scale
        found["loss_scale.good_updates"] = state.loss_scale.good_updates
    return found
