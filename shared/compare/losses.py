"""How far two loss curves may lie apart and still be one run.

Two correct programs round differently, and training amplifies that: the difference grows from step to step. So only the
first 300 steps are judged, against a limit for the number format; what comes later is reported. For scale (tiny
transformers, AdamW, mean over the last 50 of 300 steps): two correct float32 runs differ by 3e-5 and two correct
bfloat16 runs by 8e-3, while a wrong epsilon, decay, clip or schedule moves the loss by 4e-3 to 4e-2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

JUDGED_STEPS = 300


@dataclass(frozen=True)
class Limit:
    """The bound for one number format."""

    value: float
    relative_maximum: bool = False
    """Bound the largest |difference| / |loss| instead of the mean |difference|."""

    @property
    def measure(self) -> str:
        return "max_relative_diff" if self.relative_maximum else "mean_abs_diff"


LIMITS = {
    # Rounding (1e-16) leaves about 1e-15 after 300 steps; there is nothing for an average to smooth.
    "float64": Limit(1e-12, relative_maximum=True),
    # Above what rounding does, 3e-5, and far below what the smallest mistake does, 4e-3.
    "float32": Limit(1e-4),
    # Rounding alone gives 8e-3, which hides small mistakes: agreement here is necessary, not sufficient.
    "bfloat16": Limit(2e-2),
    "tf32": Limit(2e-2),
    "float16": Limit(2e-2),
}


@dataclass(frozen=True)
class LossDifference:
    """The difference of two loss curves over the steps that both recorded."""

    limit: Limit
    differences: Mapping[int, float]
    """|difference| of every common step; infinite where exactly one loss is not finite, and without the steps where
    neither is."""
    scales: Mapping[int, float]
    """The larger |loss| of those steps."""
    not_finite: tuple[int, ...]
    """Steps where neither loss is finite."""

    @property
    def mean(self) -> float | None:
        return _mean(self.differences)

    @property
    def max_at_step(self) -> int | None:
        return max(self.differences, key=lambda step: self.differences[step], default=None)

    @property
    def max(self) -> float | None:
        return None if self.max_at_step is None else self.differences[self.max_at_step]

    @property
    def bounded(self) -> dict[int, float]:
        """What the limit bounds, for every compared step: the difference, or its share of the loss."""
        if not self.limit.relative_maximum:
            return dict(self.differences)
        return {
            step: difference / self.scales[step] if math.isfinite(difference) and difference else difference
            for step, difference in self.differences.items()
        }

    @property
    def first_step_over_limit(self) -> int | None:
        return next((step for step, value in self.bounded.items() if value > self.limit.value), None)

    @property
    def judged(self) -> dict[int, float]:
        """The part of ``bounded`` that decides."""
        return {step: value for step, value in self.bounded.items() if step <= JUDGED_STEPS}

    @property
    def judged_value(self) -> float | None:
        """The figure that is held against the limit; None when nothing was compared."""
        return max(self.judged.values(), default=None) if self.limit.relative_maximum else _mean(self.judged)

    @property
    def within_limit(self) -> bool:
        return self.judged_value is not None and self.judged_value <= self.limit.value


def compare_losses(first: Mapping[int, float], second: Mapping[int, float], limit: Limit) -> LossDifference:
    """Compare the losses of the steps that both have."""
    differences, scales, not_finite = {}, {}, []
    for step in sorted(first.keys() & second.keys()):
        finite = math.isfinite(first[step]), math.isfinite(second[step])
        if any(finite):
            differences[step] = abs(first[step] - second[step]) if all(finite) else math.inf
            scales[step] = max(abs(first[step]), abs(second[step]))
        else:
            not_finite.append(step)
    return LossDifference(limit, differences, scales, tuple(not_finite))


def _mean(values: Mapping[int, float]) -> float | None:
    return math.fsum(values.values()) / len(values) if values else None
