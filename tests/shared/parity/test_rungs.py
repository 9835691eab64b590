"""Each rung holds for runs that agree, and fails, naming what differs, for runs that do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.parity import rungs
from shared.parity.bisect import bisect
from shared.parity.jobs import BACKENDS, Done, Job, Runner
from shared.parity.ladder import judge
from shared.parity.rungs import Rung, Verdict
from shared.run_directory import RunDirectory

JOB, PLAIN = Job("job", Path("c.yaml"), ("precision=float64",)), Job("plain", Path("c.yaml"))
FINGERPRINTS = {"recipe": "a", "data": "b", "initial_weights": "c", "learning_rates": "d"}
TENSORS = {
    "microbatch.rows": np.array([[0, 1]]),
    "forward.logits": np.ones(4),
    "loss": np.array(2.0),
    "gradient.w": np.ones(3),
    "update.w": np.ones(3),
    "parameter.w": np.ones(3),
}


class Made:
    """Run directories of both backends, alike until told otherwise."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.changes: dict[tuple[str, str], Any] = {}

    def change(self, what: str, value: Any, backend: str = "torch") -> Made:
        self.changes[what, backend] = value
        return self

    def done(self, job: Job, backend: str) -> Done:
        def found(what: str, default: Any) -> Any:
            return self.changes.get((what, backend), default)

        directory = RunDirectory(self.folder / f"{job.label}-{backend}")
        with directory:
            directory.write_run({"fingerprints": FINGERPRINTS | found("fingerprints", {})})
            for step in range(1, 5):
                record = {
                    "kind": "train",
                    "step": step,
                    "loss": 3.0 - 0.1 * step,
                    "grad_norm": 1.0,
                    "learning_rate": 0.1,
                    "tokens": 8,
                    "batch": f"batch {step}",
                    "loss_scale": 4.0 / step,
                    "skipped": step == 2,
                }
                directory.append(record | found(f"step {step}", {}))
            directory.append({"kind": "evaluation", "step": 4, "held_out_loss": 2.5} | found("evaluation", {}))
        traces = directory.path / "traces"
        traces.mkdir()
        for step in (1, 4):
            with (traces / f"{step}.npz").open("wb") as file:
                np.savez(file, **(TENSORS | found(f"trace {step}", {})))
        return Done(job, backend, directory.path, found("status", 0), found("output", ""))

    def results(self, *jobs: Job) -> dict[str, dict[str, Done]]:
        return {job.label: {backend: self.done(job, backend) for backend in BACKENDS} for job in jobs}


START = rungs.same_start(JOB)
STEP = rungs.same_step(JOB, [1], rungs.FLOAT64_STEP)
LOSSES = rungs.same_losses(JOB, 1e-12, relative_maximum=True)
MEAN = rungs.same_losses(JOB, 1e-4, relative_maximum=False)
SCALES = rungs.same_loss_scales(JOB)


@pytest.mark.parametrize("check", [START, STEP, LOSSES, MEAN, SCALES])
def test_equal_runs_hold(check: Callable[[Any], Verdict], tmp_path: Path) -> None:
    verdict = check(Made(tmp_path).results(JOB))
    assert verdict.ok and verdict.tensor is None and verdict.measured == 0, verdict


@pytest.mark.parametrize(
    ("check", "what", "value", "named"),
    [
        (START, "fingerprints", {"learning_rates": "x"}, "learning_rates"),
        (START, "step 3", {"batch": "x"}, "batch of step 3"),
        (STEP, "trace 1", {"forward.logits": np.ones(4) + 1e-11}, "forward.logits"),
        (STEP, "trace 1", {"gradient.w": np.ones(3) + 1e-10}, "gradient.w"),
        (STEP, "trace 1", {"microbatch.rows": np.array([[1, 0]])}, "microbatch.rows"),
        (STEP, "trace 1", {"forward.extra": np.ones(1)}, "forward.extra"),
        (LOSSES, "step 2", {"loss": 2.8 * (1 + 1e-11)}, "loss"),
        (LOSSES, "step 2", {"loss": float("nan")}, "loss"),
        (LOSSES, "step 2", {"learning_rate": 0.1 + 1e-16}, "learning_rate"),
        (LOSSES, "step 2", {"tokens": 7}, "tokens"),
        (LOSSES, "step 2", {"grad_norm": 1.0 + 1e-9}, "grad_norm"),
        (LOSSES, "evaluation", {"held_out_loss": 2.5 + 1e-10}, "held_out_loss"),
        (LOSSES, "trace 4", {"parameter.w": np.ones(3) + 1e-9}, "parameter.w"),
        (MEAN, "step 4", {"loss": 2.6 + 5e-4}, "loss"),
        (SCALES, "step 4", {"loss_scale": 2.0}, "loss_scale"),
        (SCALES, "step 3", {"skipped": True}, "skipped"),
        (SCALES, "step 3", {"learning_rate": 0.2}, "learning_rate"),
        (SCALES, "step 3", {"grad_norm": 2.0}, "grad_norm"),
    ],
)
def test_a_difference_fails_and_is_named(
    check: Callable[[Any], Verdict], what: str, value: Any, named: str, tmp_path: Path
) -> None:
    verdict = check(Made(tmp_path).change(what, value).results(JOB))
    assert not verdict.ok and verdict.tensor == named, verdict
    assert not verdict.measured <= verdict.limit


def test_scales_that_never_skip_prove_nothing(tmp_path: Path) -> None:
    made = Made(tmp_path)
    for backend in BACKENDS:
        made.change("step 2", {"skipped": False}, backend)
    assert not SCALES(made.results(JOB)).ok


def test_half_precision_is_held_to_the_others_error(tmp_path: Path) -> None:
    check = rungs.same_rounding(JOB, PLAIN)

    def ratio(jax: float, torch: float, folder: str) -> Verdict:
        coarse, exact = Made(tmp_path / folder / "coarse"), Made(tmp_path / folder / "exact")
        for step in range(1, 5):
            for backend, error in (("jax", jax), ("torch", torch)):
                coarse.change(f"step {step}", {"loss": 3.0 - 0.1 * step + error}, backend)
        return check({**coarse.results(JOB), **exact.results(PLAIN)})

    assert ratio(1e-3, 2e-3, "near").ok
    far = ratio(1e-3, 4e-3, "far")
    assert not far.ok and far.measured == pytest.approx(4, rel=1e-6)
    assert not ratio(0.0, 1e-3, "exact").ok, "one that does not round at all computes in another format"


def test_a_setting_that_changes_a_backends_own_losses_is_found(tmp_path: Path) -> None:
    check = rungs.unchanged(JOB, PLAIN, 1e-12)
    assert check({**Made(tmp_path / "a").results(JOB), **Made(tmp_path / "b").results(PLAIN)}).ok
    changed = Made(tmp_path / "c").change("step 3", {"loss": 2.7 + 1e-9}, "jax").results(JOB)
    verdict = check({**changed, **Made(tmp_path / "d").results(PLAIN)})
    assert not verdict.ok and verdict.detail.startswith("jax") and verdict.tensor == "loss"
    cut = Made(tmp_path / "e").change("trace 1", {"microbatch.rows": np.array([[0], [1]])}).results(JOB)
    assert check({**cut, **Made(tmp_path / "f").results(PLAIN)}).tensor == "microbatch.rows"


def test_formats_fail_with_the_line_that_says_which(tmp_path: Path) -> None:
    made = Made(tmp_path).change("status", 1).change("output", "exp  island  bfloat16  float32  coarser\n")
    verdict = rungs.nothing_coarser(JOB)(made.results(JOB))
    assert not verdict.ok and "torch: exp island" in " ".join(verdict.detail.split())


def test_a_run_that_failed_fails_its_rung_with_its_last_words(tmp_path: Path) -> None:
    made = Made(tmp_path).change("status", 2, "jax").change("output", "$ python\nerror: no such thing\n", "jax")
    verdict = judge(Rung("r", "", (JOB,), LOSSES), made.results(JOB))
    assert not verdict.ok and verdict.detail == "jaxtrain failed: error: no such thing"


# ---------------------------------------------------------------------------------------------------------- bisection


@dataclass(frozen=True)
class Replayed(Runner):
    """Runs nothing: gives the directories that were made."""

    made: Made = field(kw_only=True)
    asked: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)

    def run(self, backend: str, job: Job) -> Done:
        self.asked.append((backend, job.flags))
        return self.made.done(job, backend)


def test_bisection_runs_again_to_the_first_step_that_parts_and_names_its_first_tensor(tmp_path: Path) -> None:
    made = Made(tmp_path).change("step 4", {"loss": 2.0}).change("trace 4", {"gradient.w": np.zeros(3)})
    rung = Rung("float64", "", (JOB,), LOSSES)
    runner = Replayed(made.folder, made=made)
    culprit = bisect(rung, made.results(JOB), runner)
    assert culprit is not None and (culprit.step, culprit.difference.name) == (4, "gradient.w")
    assert runner.asked[0] == ("jax", ("--stop-at-step", "4", "--trace", "1", "--trace", "4"))
    assert str(culprit).startswith("jax (job) and torch (job): first differs in gradient.w at step 4")


def test_bisection_says_nothing_where_nothing_differs(tmp_path: Path) -> None:
    made = Made(tmp_path)
    assert bisect(Rung("float64", "", (JOB,), LOSSES), made.results(JOB), Replayed(made.folder, made=made)) is None


# ----------------------------------------------------------------------------------------------------------- commands


def test_commands_name_everything_that_decides_a_run(tmp_path: Path) -> None:
    job = Job("replicas", Path("c.yaml"), ("parallel.data=2",), ("--trace", "1"), devices=2)
    runner = Runner(tmp_path, overrides=("data.cache_dir=x",))
    jax, torch = (runner.command(backend, job) for backend in BACKENDS)
    assert jax[1:3] == ["-m", "jaxtrain"] and "torch.distributed.run" in torch and "torchtrain" in torch
    for command in (jax, torch):
        assert command[-4:] == ["--trace", "1", "parallel.data=2", "data.cache_dir=x"]
    mutated = Runner(tmp_path, "GELU by erf").command("torch", Job("j", Path("c.yaml")))
    assert mutated[1:5] == ["-m", "shared.parity.mutated", "GELU by erf", "torchtrain"]


def test_results_are_strict_json() -> None:
    from shared.strict_json import dumps

    value: Mapping[str, Any] = {"measured": float("inf"), "limit": 1e-12}
    assert json.loads(dumps(value)) == {"measured": "inf", "limit": 1e-12}
