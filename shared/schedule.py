"""The learning rate of every update, as one table.

Frameworks' schedulers differ at the edges (a warm-up one step late, a cosine that rises again), so neither is used:
``table[k]`` is the rate of the update after k completed updates, computed once in float64, and both backends index it.
An update beyond the end uses the last entry.
"""

from __future__ import annotations

import hashlib

import numpy as np

from shared.config.schema import ConstantSchedule, CosineSchedule, Schedule, WSDSchedule


def learning_rates(schedule: Schedule) -> np.ndarray:
    """float64 [steps].

    The warm-up is linear: entry k is peak * (k + 1) / warmup_steps. The decay ends exactly on the final rate:
    the last entry of the table.
    """
    peak, steps, warmup = schedule.learning_rate, schedule.steps, schedule.warmup_steps
    k = np.arange(steps, dtype=np.float64)
    match schedule:
        case ConstantSchedule():
            rates = np.full(steps, peak)
        case CosineSchedule(final_learning_rate=final):
            done = _progress(k, warmup, steps)
            rates = final + (peak - final) * 0.5 * (1.0 + np.cos(np.pi * done))
        case WSDSchedule(final_learning_rate=final, decay_steps=decay):
            done = _progress(k, steps - decay, steps) if decay else np.zeros(steps)
            rates = peak + (final - peak) * done
        case _:
            raise AssertionError(f"unknown schedule {schedule!r}")
    rates[:warmup] = peak * (k[:warmup] + 1.0) / max(warmup, 1)
    return rates


def _progress(k: np.ndarray, start: int, stop: int) -> np.ndarray:
    """0 for the update before ``start``, 1 for the last one before ``stop``, linear between."""
    return np.clip((k + 1.0 - start) / (stop - start), 0.0, 1.0) if stop > start else np.zeros_like(k)


def table_fingerprint(rates: np.ndarray) -> str:
    """16 hex digits of the table, after rounding to 12 significant digits.

    The rounding hides the last bit of ``cos``, in which two machines' C libraries may differ.
    """
    text = ",".join(f"{rate:.12e}" for rate in rates)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
