"""What a comparison needs to know of a run, read from its directory alone.

The directories may come from two machines, neither of which is this one, and a run may still be going on.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import UserError
from shared.run_directory import RunDirectory

FINGERPRINTS = {
    "recipe": "recipe",
    "data": "data",
    "initial_weights": "initial weights",
    "learning_rates": "learning rates",
}
"""Keys of ``fingerprints`` in ``run.json``, and what they are called in a sentence."""


@dataclass(frozen=True)
class HeldOut:
    """One evaluation."""

    loss: float
    nats_per_byte: float | None
    tokens: int | None


@dataclass(frozen=True)
class Run:
    """A run as it was recorded. Dictionaries of steps are in ascending order."""

    directory: str
    backend: str
    device: str
    num_devices: int
    version: str | None
    recipe: Mapping[str, Any]
    config: Mapping[str, Any]
    fingerprints: Mapping[str, str | None]
    total_steps: int | None
    finished: bool
    losses: Mapping[int, float]
    batches: Mapping[int, str]
    held_out: Mapping[int, HeldOut]
    tokens_per_s: float | None
    """Median over the records without the first, which may still hold start-up work."""
    num_damaged: int

    @property
    def name(self) -> str:
        """Name of the directory."""
        return Path(self.directory).resolve().name or self.directory

    @property
    def label(self) -> str:
        """Such as "jax on cpu" or "torch on 8 x NVIDIA A100"."""
        count = f"{self.num_devices} x " if self.num_devices > 1 else ""
        return f"{self.backend} on {count}{self.device}"

    @property
    def num_steps(self) -> int:
        """The last step that was recorded."""
        return max(self.losses, default=0)

    @property
    def precision(self) -> str:
        """The format that decides how finely its losses are rounded."""
        roles = self.recipe.get("precision")
        if not isinstance(roles, dict):
            return "unknown"
        matmul = roles.get("matmul", "exact")
        return str(roles.get("compute") if matmul == "exact" else matmul)


def load_run(path: str | Path) -> Run:
    """Read a run directory. Raises UserError when it is none, or when ``run.json`` lacks what every run has."""
    directory = RunDirectory(path)
    run = directory.read_run()
    metrics = directory.read_metrics()
    recipe = _mapping(directory, run, "recipe")
    device = _mapping(directory, run, "device")
    fingerprints = _mapping(directory, run, "fingerprints")
    backend = run.get("backend")
    if not isinstance(backend, str):
        raise UserError(f"{directory.run_file}: damaged, it has no 'backend'")
    # A step can be there twice when a run was killed between two checkpoints; what was written last counts.
    train = {record["step"]: record for record in metrics.train}
    steps = sorted(train)
    # "skipped" steps have no update, and a loss all the same: they are compared like the others.
    speeds = [train[step]["tokens_per_s"] for step in steps if _is_number(train[step].get("tokens_per_s"))]
    schedule = recipe.get("schedule")
    count = device.get("count")
    versions = run.get("versions")
    config = run.get("config")
    return Run(
        directory=str(path),
        backend=backend,
        device=str(device.get("kind", "unknown device")),
        num_devices=count if isinstance(count, int) else 1,
        version=versions.get(backend) if isinstance(versions, dict) else None,
        recipe=recipe,
        config=config if isinstance(config, dict) else {},
        fingerprints={name: fingerprints.get(name) for name in FINGERPRINTS},
        total_steps=schedule.get("steps") if isinstance(schedule, dict) else None,
        finished=run.get("summary") is not None,
        losses={step: float(train[step]["loss"]) for step in steps},
        batches={step: train[step]["batch"] for step in steps if isinstance(train[step].get("batch"), str)},
        held_out={
            record["step"]: HeldOut(
                float(record["held_out_loss"]), record.get("held_out_nats_per_byte"), record.get("held_out_tokens")
            )
            for record in sorted(metrics.evaluation, key=lambda record: record["step"])
        },
        tokens_per_s=statistics.median(speeds[1:] or speeds) if speeds else None,
        num_damaged=metrics.num_damaged,
    )


def _mapping(directory: RunDirectory, run: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = run.get(key)
    if not isinstance(value, dict):
        raise UserError(f"{directory.run_file}: damaged, it has no '{key}'")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
