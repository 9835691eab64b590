"""The optimiser in PyTorch: ``torch.optim``'s fused kernels, by the rules of :mod:`shared.optimizer`.

The learning rate is a tensor on the device and so is the flag that skips an update: no step waits for the host.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from shared.config.schema import SGD, AdamW
from shared.models.spec import ModelSpec
from shared.optimizer import CLIP_EPSILON
from torchtrain.weights import parameter_name


def optimizer(config: AdamW | SGD, spec: ModelSpec, model: nn.Module, rate: torch.Tensor) -> torch.optim.Optimizer:
    """An optimiser over the model's parameters in two groups, decayed and not, that reads its rate from ``rate``."""
    named = dict(model.named_parameters())
    groups: list[dict[str, object]] = []
    for decayed in (True, False):
        chosen = [named[parameter_name(piece)] for p in spec.parameters if p.decayed is decayed for piece in p.pieces]
        groups.append({"params": chosen, "weight_decay": config.weight_decay if decayed else 0.0})
    made: torch.optim.Optimizer
    if isinstance(config, AdamW):
        made = torch.optim.AdamW(groups, lr=rate, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
    else:
        made = torch.optim.SGD(groups, lr=rate, momentum=config.momentum, nesterov=config.nesterov, fused=True)
    # The moments are made here, for two reasons: a checkpoint can fill them before the first step, and the fused SGD,
    # which makes its own in the first step, leaves them uninitialised when that step is skipped.
    for parameter in named.values():
        if isinstance(config, AdamW):
            made.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        elif config.momentum:
            made.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    return made


def step(optimizer: torch.optim.Optimizer, finite: torch.Tensor) -> None:
    """Update the parameters, or leave them and all of the optimiser's state alone where ``finite`` is false.

    ``found_inf`` is how ``torch.amp.GradScaler`` tells the fused kernels to skip, without the host looking.
    """
    setattr(optimizer, "found_inf", (~finite).to(torch.float32))  # noqa: B010 - the class does not declare it
    optimizer.step()


def global_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Euclidean norm over all gradients, in their dtype."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))


def clip(gradients: Iterable[torch.Tensor], norm: torch.Tensor, clip_norm: float | None) -> None:
    """Scale gradients in place so that their norm is at most ``clip_norm``."""
    if clip_norm is not None:
        torch._foreach_mul_(list(gradients), (clip_norm / (norm + CLIP_EPSILON)).clamp(max=1.0))


def update_average(
    average: Iterable[torch.Tensor], parameters: Iterable[torch.Tensor], decay: float, finite: torch.Tensor
) -> None:
    """Move the exponential moving average by one update, unless it was skipped."""
    for a, p in zip(average, parameters, strict=True):
        a.copy_(torch.where(finite, a * decay + p * (1.0 - decay), a))
