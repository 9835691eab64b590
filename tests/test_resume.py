"""A run goes on with another number of devices or processes and another microbatch, as if nothing had happened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.backends import BACKENDS
from tests.test_replica_runs import trained
from tests.test_runs import RECIPE, losses, records, working_folder

# float32: sums in another order. What one rounding in 2^24 grows to over the 24 updates.
LIMIT = 1e-6

JOURNEYS = {
    "jax": ((1, 4), (4, 2), (2, 1)),
    "torch": ((2, 1), (1, 2), (2, 4)),
}
"""From so many devices (in PyTorch: processes) to so many."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    schedule = RECIPE["schedule"] | {"steps": 24, "warmup_steps": 4}
    sections = {"schedule": schedule, "precision": "float32", "checkpoint": {"every": 8, "keep": 9}}
    return working_folder(tmp_path_factory.mktemp("resume"), RECIPE | sections)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_travels_from_one_number_of_devices_to_the_next(backend: str, folder: Path) -> None:
    whole = trained(folder, backend, f"whole-{backend}", JOURNEYS[backend][0][0])
    moved = folder / f"moved-{backend}"
    for leg, (before, after) in enumerate(JOURNEYS[backend], start=1):
        if leg == 1:
            trained(folder, backend, moved.name, before, "--stop-at-step", "6")
        stop = ("--stop-at-step", str(6 * (leg + 1)))
        trained(folder, backend, moved.name, after, f"accumulation.microbatch={leg % 2 + 1}", *stop)
    assert [record["step"] for record in records(moved)] == list(range(1, 25))
    found, expected = losses(moved), losses(whole)
    assert np.array_equal(found[:6], expected[:6]), "bit for bit while the layout is the same"
    assert np.max(np.abs(found - expected) / expected) <= LIMIT
    held_out = [records(run, "evaluation")[-1]["held_out_loss"] for run in (moved, whole)]
    assert held_out[0] == pytest.approx(held_out[1], rel=LIMIT)


@pytest.mark.slow
def test_processes_write_one_checkpoint_together(folder: Path) -> None:
    """Each writes its part, and the first one gives the whole its name."""
    run = trained(folder, "torch", "together", 2, "--stop-at-step", "8")
    parts = sorted(path.name for path in (run / "checkpoints" / "8" / "dcp").iterdir())
    assert [part.split("-model")[0] for part in parts] == ["shard-00001", "shard-00002"]
    sizes = [(run / "checkpoints" / "8" / "dcp" / part).stat().st_size for part in parts]
    assert min(sizes) > 0.3 * sum(sizes), "the work is shared"
    assert not list((run / "checkpoints").glob(".partial*"))


ELSEWHERE = """
import os, sys
words = sys.argv[1:]
if os.environ["RANK"] == "1":
    words.append(os.environ["OTHER"])
from shared.command import main
from torchtrain.framework import Torch
sys.exit(main(words, Torch()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        ("optimizer.beta1=0.8", "the fingerprint of recipe is"),
        ("data.source.files=corpus/[0-8].txt", "the fingerprint of data is"),
        ("--run-dir=elsewhere", "the step of the newest checkpoint is 4 in process 0 and 0 in process 1"),
    ],
)
def test_processes_that_would_train_different_runs_do_not_begin(folder: Path, other: str, complaint: str) -> None:
    run = folder / ("begun" if "run-dir" in other else "fresh")
    if run.name == "begun":
        trained(folder, "torch", run.name, 2, "--stop-at-step", "4")
    (folder / "elsewhere.py").write_text(ELSEWHERE)
    words = ("--config", "recipe.yaml", "--run-dir", run.name, "parallel.data=2")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "elsewhere.py", *words]
    environment = os.environ | {"OTHER": other}
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=120)
    assert done.returncode != 0
    assert f"error: the processes do not train the same run: {complaint}" in done.stderr
    assert len(list(run.rglob("checkpoints/*"))) == (run.name == "begun"), "and nothing was written"
