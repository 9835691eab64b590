"""Hold a run that was made elsewhere to runs of the same recipe made here, one rung for each backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from shared.compare.comparison import compare_runs
from shared.compare.losses import JUDGED_STEPS
from shared.compare.runs import load_run
from shared.compare.verdict import reasons
from shared.config.schema import Config
from shared.errors import UserError
from shared.parity.difference import first_difference
from shared.parity.jobs import BACKENDS, Done, Job
from shared.parity.rungs import Results, Rung, Verdict

TRACED = 1e-3
"""Norm-wise limit for tensors of traced steps, which may come from another kind of device."""


def rungs(path: Path, config: Config, overrides: Sequence[str], directory: Path) -> list[Rung]:
    """Rungs that compare each backend, run here, with the run in ``directory``.

    Raises UserError when ``directory`` is no run, or has no step.
    """
    other = load_run(directory)
    if not other.num_steps:
        raise UserError(f"{directory}: the run has no recorded step to compare with")
    steps = min(other.num_steps, JUDGED_STEPS, config.schedule.steps)
    elsewhere = Job(directory.name, path)
    traced = Done(elsewhere, other.backend, directory, 0, "").traced_steps()
    flags = ["--stop-at-step", str(steps), *(w for s in traced if s <= steps for w in ("--trace", str(s)))]
    job = Job("here", path, (*overrides, "logging={every: 1, tensorboard: false}"), tuple(flags))
    return [
        Rung(f"{backend} here", f"{steps} updates, against {other.label}", (job,), _same_run(job, backend, directory))
        for backend in BACKENDS
    ]


def _same_run(job: Job, backend: str, directory: Path) -> Callable[[Results], Verdict]:
    def judge(results: Results) -> Verdict:
        here = results[job.label][backend]
        comparison = compare_runs(load_run(here.directory), load_run(directory))
        measured, limit = comparison.loss.judged_value, comparison.loss.limit.value
        against = reasons(comparison)
        theirs = Done(job, backend, directory, 0, "")
        for step in here.traced_steps():
            found = first_difference(here.trace(step), theirs.trace(step), TRACED)
            if against and found is not None:
                return Verdict(found.error, TRACED, False, f"step {step}, {found.name}; {against[0]}", found.name)
        words = "; ".join(against) or f"{len(comparison.loss.judged)} losses"
        return Verdict(
            math.inf if measured is None else measured, limit, not against, words, "loss" if against else None
        )

    return judge
