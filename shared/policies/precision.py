"""Precision: which number format each part of a step uses.

A preset expands to one dtype a role, so nothing is left to a framework's own idea of mixed precision. What stays in
float32 whatever the compute dtype (the *islands*): norms' statistics, softmax, rotary angles, the loss, gradient
accumulators, the optimiser. Under ``float64`` everything is float64, islands too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.schema import Precision


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2), by the rule of PyTorch's GradScaler.

    Gradients are divided by the scale once, after the last microbatch. If any is not finite, the update is skipped
    (nothing advances: no parameter, moment, update count or average) and the scale is multiplied by ``backoff``;
    after ``growth_interval`` good updates in a row it is multiplied by ``growth``.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000


@dataclass(frozen=True)
class PrecisionPolicy:
    """The dtype of every role in a training step; names are NumPy's plus ``bfloat16``."""

    name: str
    parameters: str
    """Parameters as the optimiser sees them, their moments and their average."""
    compute: str
    """Activations and the operands of every matrix product."""
    islands: str
    """Softmax, norm statistics, rotary tables, logits once they enter the loss, the loss."""
    accumulate: str
    """Gradient accumulators, the gradient norm, loss sums."""
    loss_scale: LossScale | None


def precision_policy(preset: Precision) -> PrecisionPolicy:
    """The policy that a preset's name stands for."""
    match preset:
        case "float64":
            return PrecisionPolicy(preset, "float64", "float64", "float64", "float64", None)
        case "float32" | "bfloat16":
            return PrecisionPolicy(preset, "float32", preset, "float32", "float32", None)
        case "float16":
            return PrecisionPolicy(preset, "float32", "float16", "float32", "float32", LossScale())
