"""Replicas beyond one gradient: whole runs of several devices, started as a person starts them, and what they share."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from shared.policies.accumulation import with_microbatch
from shared.trace import read_trace
from tests import backends
from tests.recipes import LLAMA, random_batch, recipe
from tests.test_replicas import error
from tests.test_runs import RECIPE, losses, records
from tests.torch_replicas import processes
from torchtrain.accumulation import fits

# float64: the same sums in another order, over 30 updates.
LIMIT = 1e-12
STEPS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a recipe whose rows have holes at the ends of its documents."""
    folder = tmp_path_factory.mktemp("replicas")
    (folder / "corpus").mkdir()
    rng = np.random.default_rng(0)
    for number in range(12):
        (folder / "corpus" / f"{number}.txt").write_text(" ".join(rng.choice(["we", "the", "people", "of"], size=300)))
    schedule = RECIPE["schedule"] | {"steps": STEPS, "warmup_steps": 5}
    sections = {"schedule": schedule, "accumulation": {"microbatch": 2}, "evaluation": {"every": 6, "max_rows": 12}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | sections))
    return folder


def trained(folder: Path, backend: str, run: str, replicas: int, *words: str) -> Path:
    environment = dict(os.environ)
    launcher = [sys.executable, "-m"]
    if backend == "jax":
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={replicas}"
    elif replicas > 1:
        launcher += ["torch.distributed.run", "--nproc-per-node", str(replicas), "-m"]
    words = ("--config", "recipe.yaml", "--run-dir", run, f"parallel.data={replicas}", *words)
    command = [*launcher, f"{backend}train", *words]
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("done: step") + done.stderr.count("stopped as asked") == 1, "one process speaks for all"
    return folder / run


@pytest.mark.slow
@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_a_run_goes_on_with_another_number_of_replicas_and_has_the_losses_of_one(backend: str, folder: Path) -> None:
    alone = trained(folder, backend, f"{backend}-alone", 1, "--trace", "2")
    shared = trained(folder, backend, f"{backend}-shared", 2, "--trace", "2", "--stop-at-step", "12")
    traces = [read_trace(run / "traces" / "2.npz") for run in (alone, shared)]
    assert list(traces[0]) == list(traces[1])
    for name, expected in traces[0].items():
        if name != "microbatch.rows":  # two replicas of two microbatches have other rows together
            np.testing.assert_allclose(traces[1][name], expected, rtol=0, atol=LIMIT, err_msg=name)

    trained(folder, backend, f"{backend}-shared", 1)
    found, expected = losses(shared), losses(alone)
    assert len(found) == STEPS
    np.testing.assert_allclose(found, expected, rtol=0, atol=LIMIT)
    assert expected[-1] < expected[0] - 0.1, "it learns, so that a wrong sum would show"
    held_out = [[record["held_out_loss"] for record in records(run, "evaluation")] for run in (shared, alone)]
    assert len(held_out[0]) == STEPS // 6
    np.testing.assert_allclose(*held_out, rtol=0, atol=LIMIT)


@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_gradients_of_coarse_parameters_are_summed_in_the_formats_of_the_policy(backend: str) -> None:
    """With a reduction after every microbatch: each sum over replicas stays in float32 until it is accumulated."""
    precision = {"preset": "float32", "parameters": "bfloat16"}
    gradients = []
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(processes(2)) if backend == "torch" else None
        for sync in ("every", "last"):
            sections: dict[str, Any] = {"parallel": {"data": 2}, "accumulation": {"microbatch": 1, "sync": sync}}
            config = recipe(precision=precision, model=LLAMA | {"num_hidden_layers": 1}, **sections)
            batch = random_batch(config, ragged=True)
            if group:
                gradients.append(group.loss_and_gradients(config.model_dump(), batch)[0][1])
            else:
                several = stack.enter_context(backends.make("jax", config))
                gradients.append(backends.loss_and_gradients(several, batch)[1])
    # Float32 sums in another order. A sum that is rounded to bfloat16 on the way is off by 1e-3.
    assert error(*gradients) < 1e-6


def test_a_microbatch_that_does_not_fit_one_replica_is_used_by_none() -> None:
    config = recipe(accumulation={"microbatch": "auto"})

    class Roomy:
        """What this replica has, which holds all rows."""

        def __init__(self, sized: Any):
            self.microbatch = sized.accumulation.microbatch
            tried.append(self.microbatch)

        def create_state(self) -> None: ...

        def train_step(self, state: None, batch: Any) -> Any:
            return state, self

        def read(self) -> None: ...

    tried: list[int] = []
    told: list[bool] = []

    def any_replica(wish: bool) -> bool:
        told.append(wish)
        return tried[-1] > 2  # the other replica holds two rows

    found = with_microbatch(config, lambda sized: fits(sized, torch.device("cuda"), Roomy, any_replica))
    assert found.accumulation.microbatch == 2
    assert told == [False] * len(tried), "each trial is agreed upon, by all replicas in the same order"


def test_a_replica_that_tries_a_step_by_itself_sends_nothing() -> None:
    """Without a process group, any collective would fail."""
    from torchtrain.backend import TorchBackend
    from torchtrain.parallel import Replicas

    for sync in ("every", "last"):
        config = recipe(parallel={"data": 2}, accumulation={"microbatch": 2, "sync": sync})
        backend = TorchBackend(config, Replicas(index=1, count=2, sending=False))
        _, metrics = backend.train_step(backend.create_state(), random_batch(config))
        assert metrics.read().tokens == 4 * 16, "its own rows"
