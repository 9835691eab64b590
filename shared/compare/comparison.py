"""Two runs side by side: what was equal, and how far the losses lie apart. :mod:`shared.compare.verdict` judges it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.compare.losses import LIMITS, Limit, LossDifference, compare_losses
from shared.compare.runs import HeldOut, Run

MISSING = "(not set)"


@dataclass(frozen=True)
class FieldDifference:
    """A field of the config that differs."""

    field: str
    first: Any
    second: Any


@dataclass(frozen=True)
class Batches:
    """Whether the runs read the same batches."""

    num_compared: int
    differing: tuple[int, ...]
    """Steps at which both recorded a batch, and not the same one."""

    @property
    def equal(self) -> bool:
        return self.num_compared > 0 and not self.differing


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side."""

    first: Run
    second: Run
    recipe_differences: tuple[FieldDifference, ...]
    execution_differences: tuple[FieldDifference, ...]
    """Settings that may differ, because they do not decide the numbers of a run."""
    batches: Batches
    loss: LossDifference
    held_out_step: int | None
    """The last step at which both measured the held-out loss."""

    @property
    def runs(self) -> tuple[Run, Run]:
        return self.first, self.second

    @property
    def itself(self) -> bool:
        """Whether both are one directory."""
        return Path(self.first.directory).resolve() == Path(self.second.directory).resolve()

    @property
    def throughput_ratio(self) -> float | None:
        """Tokens per second of the second run over those of the first."""
        first, second = self.first.tokens_per_s, self.second.tokens_per_s
        return second / first if first and second else None

    @property
    def held_out(self) -> tuple[HeldOut, HeldOut] | None:
        if self.held_out_step is None:
            return None
        return self.first.held_out[self.held_out_step], self.second.held_out[self.held_out_step]

    def fingerprint_equal(self, name: str) -> bool:
        first, second = self.first.fingerprints[name], self.second.fingerprints[name]
        return first is not None and first == second


def compare_runs(first: Run, second: Run, limit: float | None = None) -> Comparison:
    """Compare two runs; ``limit`` replaces the value of their number format's limit, not what it bounds."""
    bound = loosest_limit(first.precision, second.precision)
    if limit is not None:
        bound = Limit(limit, bound.relative_maximum)
    common = first.batches.keys() & second.batches.keys()
    return Comparison(
        first=first,
        second=second,
        recipe_differences=_differences(first.recipe, second.recipe),
        execution_differences=_differences(_execution(first), _execution(second)),
        batches=Batches(
            len(common), tuple(sorted(step for step in common if first.batches[step] != second.batches[step]))
        ),
        loss=compare_losses(first.losses, second.losses, bound),
        held_out_step=max(first.held_out.keys() & second.held_out.keys(), default=None),
    )


def loosest_limit(*precisions: str) -> Limit:
    """The limit of the coarsest number format; float32's where the format is unknown."""
    return max((LIMITS.get(name, LIMITS["float32"]) for name in precisions), key=lambda limit: limit.value)


def _execution(run: Run) -> dict[str, Any]:
    """The settings of which a person would want to know when the speeds differ."""
    sections = ("accumulation", "remat", "parallel", "offload", "execution")
    return {name: run.config[name] for name in sections if name in run.config}


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[FieldDifference, ...]:
    flat = _flatten(first), _flatten(second)
    names = list(dict.fromkeys([*flat[0], *flat[1]]))
    pairs = ((name, flat[0].get(name, MISSING), flat[1].get(name, MISSING)) for name in names)
    return tuple(FieldDifference(*pair) for pair in pairs if pair[1] != pair[2])


def _flatten(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
