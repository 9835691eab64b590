"""What a run of PyTorch carries from step to step, and the roles that its tensors have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


def tensors(state: TrainState) -> dict[str, dict[str, torch.Tensor]]:
    """The state's large tensors by role and name of the parameter; filling them in place changes the state."""
    named = dict(state.model.named_parameters())
    found = {"parameters": {name: parameter.detach() for name, parameter in named.items()}}
    for role in state.optimizer.roles:
        found[role] = {name: state.optimizer.moments[parameter][role] for name, parameter in named.items()}
    if state.average is not None:
        found["average"] = state.average
    return found


def scalars(state: TrainState) -> dict[str, torch.Tensor]:
    """The rest of it, likewise."""
    found = {"num_updates": state.num_updates}
    if state.loss_scale is not None:
        found |= {"loss_scale": state.loss_scale.scale, "good_updates": state.loss_scale.good_updates}
    return found


def flat(tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors under one name each, as a checkpoint has them."""
    return {f"{role}.{name}": tensor for role, named in tensors.items() for name, tensor in named.items()}
