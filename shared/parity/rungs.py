"""The rungs of the ladder: what each compares, how far it may differ, and why that far.

Finest first. In float64 nothing hides behind rounding, so an epsilon in the wrong place shows at once; float32 is what
is really trained; half precision can only be held to its distance from float32. The rest says that what may not change
the result does not: how the work is cut up, over how many devices, and whether the run was interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shared.compare.losses import LIMITS
from shared.parity.difference import TensorDifference, differences
from shared.parity.jobs import BACKENDS, Done, Job

FLOAT32_LIMIT = LIMITS["float32"].value
FLOAT64_LIMIT = LIMITS["float64"].value

Results = Mapping[str, Mapping[str, Done]]
"""What jobs left, by label and backend."""


@dataclass(frozen=True)
class Verdict:
    """What a rung found."""

    measured: float
    limit: float
    ok: bool
    detail: str
    """The same in words: where the largest difference lies, or what is wrong."""
    tensor: str | None = None
    """What differs first: a tensor's or a figure's name; None when nothing does."""


@dataclass(frozen=True)
class Rung:
    """One check of both backends."""

    name: str
    compares: str
    jobs: tuple[Job, ...]
    judge: Callable[[Results], Verdict]
    plain: Job | None = None
    """Where each backend is held to its own run under other settings, that run."""


def fingerprints(job: Job) -> Rung:
    """Both runs start from the same things, and read the same batches."""
    return Rung("fingerprints", "recipe, data, weights, rates, batches", (job,), same_start(job))


def float64_step(job: Job, steps: Sequence[int]) -> Rung:
    """All tensors of these steps."""
    return Rung("float64 step", "every tensor of a step", (job,), same_step(job, steps, FLOAT64_STEP))


def float64(job: Job, updates: int) -> Rung:
    """A whole run, to the last digits."""
    return Rung("float64", f"{updates} updates", (job,), same_losses(job, FLOAT64_LIMIT, relative_maximum=True))


def loss_scale(job: Job) -> Rung:
    """A float16 run that overflows."""
    return Rung("loss scale", "scales and skipped updates", (job,), same_loss_scales(job))


def formats(job: Job) -> Rung:
    """What ``--explain precision`` finds."""
    return Rung("dtypes", "formats that really ran", (job,), nothing_coarser(job))


def invariant(compares: str, changed: Job, plain: Job) -> Rung:
    """What may not change a result does not: each backend's run against its own plain one."""
    return Rung(changed.label, compares, (changed, plain), unchanged(changed, plain, FLOAT64_LIMIT), plain)


# ------------------------------------------------------------------------------------------------ one backend, another


def same_start(job: Job) -> Callable[[Results], Verdict]:
    """Recipe, data, initial weights and learning rates have equal fingerprints, and so has every batch."""

    def judge(results: Results) -> Verdict:
        first, second = _pair(results, job)
        wrong = [name for name, value in first.fingerprints().items() if second.fingerprints().get(name) != value]
        batches = first.batches(), second.batches()
        wrong += [f"batch of step {step}" for step in sorted(batches[0]) if batches[1].get(step) != batches[0][step]]
        equal = f"{len(first.fingerprints())} fingerprints and {len(batches[0])} batches are equal"
        return Verdict(len(wrong), 0, not wrong, ", ".join(wrong[:3]) or equal, wrong[0] if wrong else None)

    return judge


FLOAT64_STEP = {
    "microbatch.": 0.0,
    "forward.": 1e-12,
    "loss": 1e-12,
    "gradient.": 1e-11,
    "update.": 1e-9,
    "parameter.": 1e-11,
}
"""Norm-wise rounding is 1e-15; Adam's first update divides small gradients by themselves and so amplifies it."""

FLOAT32_STEP = {"microbatch.": 0.0, "forward.": 1e-5, "loss": 1e-5, "gradient.": 1e-4}
"""Norm-wise rounding is a few 1e-7. Updates are left to float64: Adam turns the rounding of a gradient near zero into a
whole step."""


def same_step(job: Job, steps: Sequence[int], limits: Mapping[str, float]) -> Callable[[Results], Verdict]:
    """Every tensor of these steps agrees."""

    def judge(results: Results) -> Verdict:
        first, second = _pair(results, job)
        worst, allowed, share, count = TensorDifference("none", 0.0), 0.0, -1.0, 0
        for step in steps:
            for found in differences(first.trace(step), second.trace(step)):
                limit = next((value for prefix, value in limits.items() if found.name.startswith(prefix)), None)
                if limit is None:
                    continue
                count += 1
                if not found.error <= limit:
                    return Verdict(found.error, limit, False, f"step {step}, {found.name}", found.name)
                if limit and found.error / limit > share:
                    worst, allowed, share = found, limit, found.error / limit
        return Verdict(worst.error, allowed, True, f"{count} tensors; largest in {worst.name}")

    return judge


def same_losses(job: Job, limit: float, relative_maximum: bool) -> Callable[[Results], Verdict]:
    """The loss curves agree, and where the limit bounds the largest relative difference, so does all else."""

    def judge(results: Results) -> Verdict:
        first, second = _pair(results, job)
        losses = first.column("loss"), second.column("loss")
        if losses[0].keys() != losses[1].keys():
            return Verdict(math.inf, limit, False, f"{len(losses[0])} steps and {len(losses[1])}", "loss")
        apart = [abs(losses[0][step] - losses[1][step]) for step in losses[0]]
        if not relative_maximum:
            mean = float(np.mean(apart))
            return Verdict(
                mean, limit, mean <= limit, f"{len(apart)} steps, largest {max(apart):.1e}", _at(mean, limit)
            )
        for name, allowed in (("learning_rate", 0.0), ("tokens", 0.0), ("loss", limit), ("grad_norm", 100 * limit)):
            step, error = _largest(first.column(name), second.column(name))
            if not error <= allowed:
                return Verdict(error, allowed, False, f"{name} of step {step}", name)
        _, measured = _largest(*losses)
        _, held_out = _largest(first.held_out(), second.held_out())
        if not held_out <= limit:
            return Verdict(held_out, limit, False, "held-out loss", "held_out_loss")
        last = max(first.traced_steps(), default=0)
        found = [d for d in differences(first.trace(last), second.trace(last)) if d.name.startswith("parameter.")]
        worst = max(found, key=lambda d: d.error)
        if not worst.error <= 100 * limit:
            return Verdict(worst.error, 100 * limit, False, f"{worst.name} after step {last}", worst.name)
        words = f"{len(apart)} steps; parameters within {worst.error:.0e}"
        if first.held_out():
            words += f", held-out loss within {held_out:.0e}"
        return Verdict(measured, limit, True, words)

    return judge


def same_rounding(job: Job, oracle: Job) -> Callable[[Results], Verdict]:
    """Each backend's mean error against its own float32 run is at most three times the other's.

    Two correct half-precision runs differ by their rounding, about 1e-2, which would hide a mistake; but their errors
    are of one size, unless one of them rounds where the other does not.
    """

    def judge(results: Results) -> Verdict:
        errors = {}
        for backend in BACKENDS:
            found, exact = results[job.label][backend].column("loss"), results[oracle.label][backend].column("loss")
            errors[backend] = float(np.mean([abs(found[step] - exact[step]) for step in found if step in exact]))
        small, large = sorted(errors.values())
        ratio = large / small if small else (math.inf if large else 1.0)
        words = ", ".join(f"{backend} {error:.1e}" for backend, error in errors.items())
        return Verdict(ratio, 3.0, ratio <= 3.0, f"mean error against float32: {words}", _at(ratio, 3.0))

    return judge


def same_loss_scales(job: Job) -> Callable[[Results], Verdict]:
    """The loss scale moves alike, and the same updates are skipped."""

    def judge(results: Results) -> Verdict:
        first, second = _pair(results, job)
        for name in ("loss_scale", "skipped", "learning_rate"):
            one, other = first.column(name), second.column(name)
            wrong = [step for step in one if one[step] != other.get(step)]
            if wrong or not one:
                return Verdict(len(wrong), 0, False, f"{name} of step {wrong[0] if wrong else 1}", name)
        # Rounding in float16, amplified by a few updates; a gradient that is unscaled wrongly is off by a power of 2.
        step, error = _largest(*(_of_good_updates(done) for done in (first, second)))
        if not error <= 0.2:
            return Verdict(error, 0.2, False, f"grad_norm of step {step}", "grad_norm")
        skipped = first.column("skipped").values()
        moved = len(set(first.column("loss_scale").values()))
        ok = 0 < sum(skipped) < len(skipped)
        return Verdict(0, 0, ok, f"{len(skipped)} steps, {int(sum(skipped))} skipped, {moved} scales", None)

    return judge


# ------------------------------------------------------------------------------------------- one backend, and itself


def unchanged(job: Job, plain: Job, limit: float) -> Callable[[Results], Verdict]:
    """Each backend's run has the losses of its own plain one, and both backends cut the work up alike."""

    def judge(results: Results) -> Verdict:
        worst, where = 0.0, "all"
        for backend in BACKENDS:
            found, expected = results[job.label][backend], results[plain.label][backend]
            for name in ("loss", "grad_norm"):
                allowed = limit if name == "loss" else 100 * limit
                column = expected.column(name)
                step, error = _largest(found.column(name), {s: column[s] for s in found.column(name) if s in column})
                if not error <= allowed:
                    return Verdict(error, allowed, False, f"{backend}: {name} of step {step}", name)
                if name == "loss" and error > worst:
                    worst, where = error, backend
        first, second = _pair(results, job)
        for step in first.traced_steps():
            if not np.array_equal(first.trace(step)["microbatch.rows"], second.trace(step)["microbatch.rows"]):
                return Verdict(math.inf, limit, False, "rows of the microbatches", "microbatch.rows")
        steps = len(first.column("loss"))
        return Verdict(worst, limit, True, f"{steps} steps in each backend; largest in {where}")

    return judge


def nothing_coarser(job: Job) -> Callable[[Results], Verdict]:
    """No product or sum ran in a coarser format than the policy says: the exit status of ``--explain precision``."""

    def judge(results: Results) -> Verdict:
        wrong = [backend for backend in BACKENDS if not results[job.label][backend].ok]
        if not wrong:
            return Verdict(0, 0, True, "no product or sum is coarser than the policy says")
        lines = [line.strip() for line in results[job.label][wrong[0]].output.splitlines() if "coarser" in line]
        return Verdict(len(wrong), 0, False, f"{wrong[0]}: {lines[0] if lines else 'see its log'}", "dtypes")

    return judge


# ------------------------------------------------------------------------------------------------------------ figures


def _of_good_updates(done: Done) -> dict[int, float]:
    skipped = done.column("skipped")
    return {step: norm for step, norm in done.column("grad_norm").items() if not skipped[step]}


def _pair(results: Results, job: Job) -> tuple[Done, Done]:
    first, second = (results[job.label][backend] for backend in BACKENDS)
    return first, second


def _largest(first: Mapping[int, float], second: Mapping[int, float]) -> tuple[int, float]:
    """(step, relative difference) where two columns lie farthest apart; infinite where they have other steps."""
    if first.keys() != second.keys():
        return min(first.keys() ^ second.keys()), math.inf
    worst = (0, 0.0)
    for step, one in first.items():
        other = second[step]
        same = one == other or (math.isnan(one) and math.isnan(other))
        error = 0.0 if same else abs(one - other) / max(abs(one), abs(other))
        if math.isnan(error):
            return step, math.inf
        if error > worst[1]:
            worst = (step, error)
    return worst


def _at(measured: float, limit: float) -> str | None:
    return None if measured <= limit else "loss"
