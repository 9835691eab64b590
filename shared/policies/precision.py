"""Precision: which number format each part of a step uses.

A preset expands to one dtype a role, so nothing is left to a framework's own idea of mixed precision; a recipe may
depart from it role by role. What the presets keep in float32 whatever the compute dtype (the *islands*): norms'
statistics, softmax, rotary angles, the loss; and gradient accumulators and the optimiser beside them. Under
``float64`` everything is float64, islands too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.precision import LossScale, Precision, roles


@dataclass(frozen=True)
class PrecisionPolicy:
    """The dtype of every role in a training step; names are NumPy's plus ``bfloat16``."""

    parameters: str
    """Parameters between updates, and their average."""
    compute: str
    """Activations and the operands of every matrix product."""
    logits: str
    """What the output head's product gives."""
    islands: str
    """Softmax, norm statistics, rotary tables, logits once they enter the loss, the loss."""
    accumulate: str
    """Gradient accumulators, the gradient norm, loss sums, and the arithmetic of the update."""
    reduce: str
    """Gradients while they are summed over replicas."""
    optimizer_state: str
    """The optimiser's moments between updates."""
    matmul: str
    """How products of float32 operands are computed: ``exact``, ``tf32`` or ``bfloat16``."""
    loss_scale: LossScale | None


def precision_policy(precision: Precision) -> PrecisionPolicy:
    """The policy that a preset and its departures stand for."""
    return PrecisionPolicy(**roles(precision))
