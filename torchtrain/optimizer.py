"""The optimiser in PyTorch: ``torch.optim``'s fused kernels, by the rules of :mod:`shared.optimizer`.

The learning rate is a tensor on the device and so is the flag that skips an update: no step waits for the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from shared.config.schema import SGD, AdamW
from shared.models.spec import ModelSpec
from shared.optimizer import CLIP_EPSILON
from torchtrain.offload import host_zeros
from torchtrain.precision import Dtypes
from torchtrain.weights import parameter_name

_NAMES = {"first_moment": "exp_avg", "second_moment": "exp_avg_sq", "momentum": "momentum_buffer"}
"""How ``torch.optim`` calls a moment, by its role."""


class Optimizer:
    """``torch.optim``'s update for every parameter, and the moments that it needs.

    Where parameters, moments and arithmetic have one dtype and live on one device, a single fused call updates all of
    them in place. Where moments are kept in another dtype or in host memory, or parameters are coarser than the
    arithmetic, one parameter after the other is raised, updated by the same kernel, and stored.
    """

    def __init__(
        self, config: AdamW | SGD, spec: ModelSpec, model: nn.Module, rate: torch.Tensor, dtypes: Dtypes, on_host: bool
    ):
        self.config, self.rate, self.arithmetic = config, rate, dtypes.accumulate
        named = dict(model.named_parameters())
        self.decay = {
            named[parameter_name(piece)]: config.weight_decay if parameter.decayed else 0.0
            for parameter in spec.parameters
            for piece in parameter.pieces
        }
        # The moments are made here, for two reasons: a checkpoint can fill them before the first step, and the fused
        # SGD, which makes its own in the first step, leaves them uninitialised when that step is skipped.
        self.roles = _roles(config)
        self.moments = {p: self._zeros(p, dtypes.optimizer_state, on_host) for p in named.values()}
        self.steps = {p: torch.zeros((), dtype=torch.float32, device=p.device) for p in named.values()}
        """Completed updates, once for each parameter, as the fused kernels want it."""
        self.fused: torch.optim.Optimizer | None = None
        if not on_host and dtypes.parameters == dtypes.optimizer_state == dtypes.accumulate:
            self.fused = self._torch_optimizer(list(named.values()))
            for parameter, moments in self.moments.items():
                self.fused.state[parameter] = self._state(parameter, moments)

    def step(self, gradients: Mapping[nn.Parameter, torch.Tensor], finite: torch.Tensor) -> None:
        """Update the parameters, or leave them and the moments alone where ``finite`` is false.

        ``gradients`` are in the arithmetic's dtype; where that is the parameters', they are their ``.grad``.
        """
        if self.fused is not None:
            _run(self.fused, finite)
            return
        for parameter, gradient in gradients.items():
            raised = nn.Parameter(parameter.detach().to(self.arithmetic, copy=True))
            raised.grad = gradient
            one = self._torch_optimizer([raised], self.decay[parameter])
            kept = self.moments[parameter]
            one.state[raised] = self._state(parameter, {role: self._raised(kept[role], parameter) for role in kept})
            _run(one, finite)
            for role, moment in kept.items():
                moment.copy_(one.state[raised][_NAMES[role]])
            parameter.detach().copy_(raised.detach())

    def set_step(self, num_updates: torch.Tensor) -> None:
        """Go on after so many completed updates."""
        for step in self.steps.values():
            step.copy_(num_updates)

    def _state(self, parameter: nn.Parameter, moments: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What ``torch.optim`` keeps for a parameter."""
        named = {_NAMES[role]: moment for role, moment in moments.items()}
        return named | {"step": self.steps[parameter]} if isinstance(self.config, AdamW) else named

    def _raised(self, moment: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """A moment as the arithmetic wants it, in memory of its own."""
        return moment.to(device=parameter.device, dtype=self.arithmetic, copy=True)

    def _torch_optimizer(self, parameters: list[nn.Parameter], decay: float | None = None) -> torch.optim.Optimizer:
        """In one group for each decay, or with the given decay."""
        groups: dict[float, list[nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault(self.decay[parameter] if decay is None else decay, []).append(parameter)
        made = [{"params": chosen, "weight_decay": weight_decay} for weight_decay, chosen in groups.items()]
        if isinstance(self.config, AdamW):
            betas = self.config.beta1, self.config.beta2
            return torch.optim.AdamW(made, lr=self.rate, betas=betas, eps=self.config.eps, fused=True)
        momentum, nesterov = self.config.momentum, self.config.nesterov
        return torch.optim.SGD(made, lr=self.rate, momentum=momentum, nesterov=nesterov, fused=True)

    def _zeros(self, parameter: nn.Parameter, dtype: torch.dtype, on_host: bool) -> dict[str, torch.Tensor]:
        def zeros() -> torch.Tensor:
            if on_host:
                return host_zeros(parameter, dtype)
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)

        return {role: zeros() for role in self.roles}


def _roles(config: AdamW | SGD) -> tuple[str, ...]:
    if isinstance(config, AdamW):
        return "first_moment", "second_moment"
    return ("momentum",) if config.momentum else ()


def _run(optimizer: torch.optim.Optimizer, finite: torch.Tensor) -> None:
    """``found_inf`` is how ``torch.amp.GradScaler`` tells the fused kernels to skip, without the host looking."""
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
    average: Iterable[torch.Tensor],
    parameters: Iterable[torch.Tensor],
    decay: float,
    finite: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Move the exponential moving average by one update, computed in ``dtype``, unless it was skipped."""
    for a, p in zip(average, parameters, strict=True):
        a.copy_(torch.where(finite, a.to(dtype) * decay + p.to(dtype) * (1.0 - decay), a.to(dtype)))
