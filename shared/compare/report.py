"""The comparison for other programs: what ``--json`` writes. The keys are stable."""

from __future__ import annotations

from typing import Any

from shared.compare.comparison import Comparison
from shared.compare.losses import LossDifference
from shared.compare.runs import FINGERPRINTS, Run
from shared.compare.verdict import reasons, sentence


def report(comparison: Comparison) -> dict[str, Any]:
    """Plain data; of every pair of values the first run's comes first. ``throughput_ratio`` is second over first."""
    against = reasons(comparison)
    return {
        "same_run": not against,
        "reasons": against,
        "verdict": sentence(comparison),
        "fingerprints": _fingerprints(comparison),
        "recipe_differences": [
            {"field": item.field, "values": [item.first, item.second]} for item in comparison.recipe_differences
        ],
        "loss": _loss(comparison.loss),
        "held_out": _held_out(comparison),
        "throughput_ratio": comparison.throughput_ratio,
        "runs": [_run(run) for run in comparison.runs],
    }


def _fingerprints(comparison: Comparison) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: {
            "equal": comparison.fingerprint_equal(name),
            "values": [run.fingerprints[name] for run in comparison.runs],
        }
        for name in FINGERPRINTS
    }
    batches = comparison.batches
    found["batches"] = {
        "equal": batches.equal,
        "steps_compared": batches.num_compared,
        "steps_that_differ": len(batches.differing),
        "first_step_that_differs": min(batches.differing, default=None),
    }
    return found


def _loss(loss: LossDifference) -> dict[str, Any]:
    return {
        "mean_abs_diff": loss.mean,
        "max_abs_diff": loss.max,
        "max_at_step": loss.max_at_step,
        "first_step_over_limit": loss.first_step_over_limit,
        "steps_compared": len(loss.differences),
        "steps_not_finite": len(loss.not_finite),
        "judged": {
            "measure": loss.limit.measure,
            "value": loss.judged_value,
            "limit": loss.limit.value,
            "within_limit": loss.within_limit,
            "steps_compared": len(loss.judged),
        },
    }


def _held_out(comparison: Comparison) -> dict[str, Any] | None:
    pair = comparison.held_out
    if pair is None:
        return None
    return {
        "step": comparison.held_out_step,
        "loss": [each.loss for each in pair],
        "nats_per_byte": [each.nats_per_byte for each in pair],
        "tokens": [each.tokens for each in pair],
        "abs_diff": abs(pair[0].loss - pair[1].loss),
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "directory": run.directory,
        "backend": run.backend,
        "version": run.version,
        "device": run.device,
        "num_devices": run.num_devices,
        "steps": run.num_steps,
        "total_steps": run.total_steps,
        "finished": run.finished,
        "tokens_per_s": run.tokens_per_s,
        "damaged_lines": run.num_damaged,
    }
