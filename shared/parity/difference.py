"""Where two runs part: the first tensor that differs, in the order in which a step computes its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

STAGES = ("microbatch.", "forward.", "loss", "gradient.", "update.", "parameter.")
"""Prefixes of the names in a trace, in the order of a step."""


@dataclass(frozen=True)
class TensorDifference:
    """How far one tensor lies from its counterpart."""

    name: str
    error: float
    """Norm of the difference over the norm of the second tensor; infinite where one is missing, has another shape, or
    is not finite where the other is."""


def relative_error(first: np.ndarray, second: np.ndarray) -> float:
    """Norm of the difference over the norm of ``second``, in float64."""
    if first.shape != second.shape:
        return float("inf")
    first, second = first.astype(np.float64), second.astype(np.float64)
    if not np.array_equal(np.isfinite(first), np.isfinite(second)):
        return float("inf")
    finite = np.isfinite(second)
    difference, size = np.linalg.norm((first - second)[finite]), np.linalg.norm(second[finite])
    if not difference:
        return 0.0
    return float(difference / size) if size else float("inf")


def differences(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> list[TensorDifference]:
    """All tensors of two traces, in the order of a step.

    Gradients come in the order of the backward pass: the last layer's first, since its error reaches the others.
    """
    names = list(dict.fromkeys([*first, *second]))
    ordered = [
        name
        for stage in STAGES
        for name in (reversed(names) if stage == "gradient." else names)
        if name.startswith(stage)
    ]
    missing = np.full(0, np.nan)
    return [TensorDifference(n, relative_error(first.get(n, missing), second.get(n, missing))) for n in ordered]


def first_difference(
    first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray], limit: float
) -> TensorDifference | None:
    """The first tensor, in the order of a step, whose error is above ``limit``."""
    return next((d for d in differences(first, second) if not d.error <= limit), None)
