"""After a rung has failed: which step, and which tensor of it, differs first.

Both sides run again up to the first step whose loss or gradient norm is apart, and write the tensors of that step and
of the first one. The first tensor that differs, in the order in which a step computes them, is where to look.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shared.parity.difference import TensorDifference, first_difference
from shared.parity.jobs import BACKENDS, Done, Job, Runner
from shared.parity.rungs import Results, Rung

TOLERANCE = {"float64": 1e-9, "float32": 1e-3}
"""Norm-wise; far above rounding, far below a mistake. In half precision rounding hides what is looked for."""


@dataclass(frozen=True)
class Culprit:
    """The first difference between two runs."""

    step: int
    difference: TensorDifference
    sides: str

    def __str__(self) -> str:
        return (
            f"{self.sides}: first differs in {self.difference.name} at step {self.step}, by {self.difference.error:.1e}"
        )


def bisect(rung: Rung, results: Results, runner: Runner) -> Culprit | None:
    """The first tensor that differs, or None where the rung compares no tensors or nothing is found."""
    precision = next((name for name in TOLERANCE if f"precision={name}" in rung.jobs[0].overrides), None)
    if precision is None:
        return None
    for first, second in _sides(rung, results):
        if not (first.ok and second.ok):
            continue
        step = _first_apart(first, second, TOLERANCE[precision])
        again = [_traced(runner, done, sorted({1, step})) for done in (first, second)]
        for traced in sorted({1, step}):
            found = first_difference(again[0].trace(traced), again[1].trace(traced), TOLERANCE[precision])
            if found is not None:
                sides = [f"{done.backend} ({done.job.label})" for done in (first, second)]
                return Culprit(traced, found, " and ".join(sides))
    return None


def _sides(rung: Rung, results: Results) -> Iterator[tuple[Done, Done]]:
    changed: Mapping[str, Done] = results[rung.jobs[0].label]
    if rung.plain is None:
        yield changed["jax"], changed["torch"]
        return
    for backend in BACKENDS:
        yield changed[backend], results[rung.plain.label][backend]


def _first_apart(first: Done, second: Done, tolerance: float) -> int:
    for name in ("loss", "grad_norm"):
        one, other = first.column(name), second.column(name)
        for step in sorted(one.keys() & other.keys()):
            if not abs(one[step] - other[step]) <= tolerance * abs(other[step]):
                return step
    return 1


def _traced(runner: Runner, done: Done, steps: list[int]) -> Done:
    """The same run again up to the last of the steps, with traces."""
    flags = [word for step in steps for word in ("--trace", str(step))]
    job: Job = replace(
        done.job,
        label=f"{done.job.label}-traced",
        flags=("--stop-at-step", str(steps[-1]), *flags),
        resumed_after=None,
    )
    return runner.run(done.backend, job)
