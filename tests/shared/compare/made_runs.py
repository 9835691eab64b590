"""Run directories made up for the tests, as the trainer would leave them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.run_directory import RunDirectory

RECIPE = {
    "seed": 0,
    "precision": {"compute": "float32"},
    "optimizer": {"name": "adamw", "eps": 1e-8},
    "schedule": {"steps": 4},
}
FINGERPRINTS = {"recipe": "aaaa", "data": "bbbb", "initial_weights": "cccc", "learning_rates": "dddd"}


def make_run(
    path: Path,
    losses: Mapping[int, float] | Sequence[float] = (4.0, 3.0, 2.0, 1.0),
    *,
    recipe: Mapping[str, Any] | None = None,
    fingerprints: Mapping[str, Any] | None = None,
    batches: Mapping[int, str | None] | None = None,
    held_out: Mapping[int, float] | None = None,
    held_out_tokens: int = 100,
    tokens_per_s: float | None = 1000.0,
    summary: Mapping[str, Any] | None = None,
    **run: Any,
) -> Path:
    """A run of ``losses`` (by step, or of steps 1, 2, ...); the rest changes single things of a common run.

    The first record has no speed and the second a tenth of it, as a run has that still warms up.
    """
    if not isinstance(losses, Mapping):
        losses = dict(enumerate(losses, start=1))
    with RunDirectory(path) as directory:
        directory.truncate_after(0)
        directory.write_run(
            {
                "backend": "jax",
                "recipe": {**RECIPE, **(recipe or {})},
                "config": {},
                "fingerprints": {**FINGERPRINTS, **(fingerprints or {})},
                "device": {"kind": "cpu", "count": 1},
                "versions": {"jax": "0.10.2", "torch": "2.13.0"},
                "summary": summary,
                **run,
            }
        )
        for number, (step, loss) in enumerate(losses.items()):
            speed = tokens_per_s and (None, tokens_per_s / 10, tokens_per_s)[min(number, 2)]
            batch = {**{step: f"{step:016x}"}, **(batches or {})}[step]
            directory.append({"kind": "train", "step": step, "loss": loss, "tokens_per_s": speed, "batch": batch})
        for step, loss in (held_out or {}).items():
            directory.append(
                {
                    "kind": "evaluation",
                    "step": step,
                    "held_out_loss": loss,
                    "held_out_nats_per_byte": loss / 2,
                    "held_out_tokens": held_out_tokens,
                }
            )
    return path
