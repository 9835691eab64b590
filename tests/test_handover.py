"""A run moves from one backend to the other, and goes on as if it had never moved."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from shared.config.recipe import recipe_hash, recipe_of
from shared.handover import HandOver, write_handover
from shared.initialization import FirstDraws
from shared.models import model_spec
from tests import backends
from tests.backends import BACKENDS
from tests.recipes import ADAMW, LLAMA, recipe
from tests.test_runs import RECIPE, losses, records, train, trained, working_folder

STEPS = 300
HALF = 150

# float64, two frameworks: what tests/test_runs.py holds two whole runs to.
LIMIT = 1e-12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a recipe that has everything a state can hold but a loss scale."""
    return working_folder(tmp_path_factory.mktemp("handover"), RECIPE | {"checkpoint": {"every": HALF}})


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Path]:
    return {backend: trained(folder, backend, f"whole-{backend}", "--quiet") for backend in BACKENDS}


def export(folder: Path, backend: str, run: str, to: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"{backend}train.export", run, "--to", to, *words]
    return subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=120)


def exported(folder: Path, backend: str, run: str, to: str, *words: str) -> Path:
    done = export(folder, backend, run, to, *words)
    assert done.returncode == 0, done.stderr
    return folder / to


def other(backend: str) -> str:
    return next(name for name in BACKENDS if name != backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_150_steps_here_and_150_there_are_300_in_one(folder: Path, backend: str, whole: dict[str, Path]) -> None:
    state = exported(folder, backend, f"whole-{backend}", f"state-{backend}", "--step", str(HALF))
    moved = trained(folder, other(backend), f"from-{backend}", "--quiet", "--init-from", state.name)
    assert [record["step"] for record in records(moved)] == list(range(HALF + 1, STEPS + 1))
    expected = losses(whole[backend])[HALF:]
    assert np.max(np.abs(losses(moved) - expected) / expected) <= LIMIT
    assert [record["batch"] for record in records(moved)] == [
        record["batch"] for record in records(whole[backend])[HALF:]
    ]
    held_out = [records(run, "evaluation")[-1]["held_out_loss"] for run in (moved, whole[backend])]
    assert held_out[0] == pytest.approx(held_out[1], rel=LIMIT)

    # The states at the end, role by role: parameters as test_runs has them, moments by the largest of their tensor.
    ends = [
        exported(folder, name, run.name, f"end-{run.name}")
        for name, run in ((other(backend), moved), (backend, whole[backend]))
    ]
    for role in ("parameters", "average", "first_moment", "second_moment"):
        ours, theirs = (load_file(end / f"{role}.safetensors") for end in ends)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert value.dtype == np.float64
            assert np.max(np.abs(ours[name] - value)) <= 1e-10 * np.max(np.abs(value)), (role, name)
    manifests = [json.loads((end / "manifest.json").read_text()) for end in ends]
    assert manifests[0]["state"] == manifests[1]["state"] and manifests[0]["state"]["num_updates"] == STEPS


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_that_comes_back_is_bit_for_bit_the_one_that_left(
    folder: Path, backend: str, whole: dict[str, Path]
) -> None:
    """Export and import round nothing, in any format: the same backend goes on as from its own checkpoint."""
    words = ("--quiet", "precision=float16", "schedule.steps=9", "schedule.warmup_steps=2", "optimizer.ema_decay=0.9")
    mixed = ("precision={preset: bfloat16, parameters: bfloat16, optimizer_state: bfloat16}", *words[2:], "--quiet")
    for name, settings in (("float16", words), ("bfloat16", mixed)):
        run = trained(folder, backend, f"{name}-{backend}", *settings, "checkpoint={every: 4, keep: 3}")
        state = exported(folder, backend, run.name, f"{name}-state-{backend}", "--step", "4")
        again = trained(folder, backend, f"{name}-again-{backend}", *settings, "--init-from", state.name)
        assert np.array_equal(losses(again), losses(run)[4:]), name
        assert [r.get("loss_scale") for r in records(again)] == [r.get("loss_scale") for r in records(run)[4:]]


def test_sgd_carries_its_momentum_over(folder: Path) -> None:
    sgd = "optimizer={name: sgd, momentum: 0.9, nesterov: true, weight_decay: 0.01, clip_norm: 1.0}"
    words = ("--quiet", sgd, "schedule.steps=30", "schedule.warmup_steps=0")
    whole = trained(folder, "jax", "sgd", *words, "checkpoint.every=15")
    state = exported(folder, "jax", "sgd", "sgd-state", "--step", "15")
    assert sorted(path.stem for path in state.glob("*.safetensors")) == ["momentum", "parameters"]
    moved = trained(folder, "torch", "sgd-moved", *words, "--init-from", state.name)
    assert np.max(np.abs(losses(moved) - losses(whole)[15:])) <= LIMIT


def test_a_run_that_began_elsewhere_goes_on_and_says_where_it_began(folder: Path, whole: dict[str, Path]) -> None:
    state = exported(folder, "jax", "whole-jax", "state-to-stop", "--step", str(HALF))
    words = ("--init-from", state.name)
    done = train(folder, "torch", "stopped", *words, "--stop-at-step", "160")
    assert done.returncode == 0 and f"goes on from step {HALF} of jaxtrain, in {state.name}" in done.stderr
    trained(folder, "torch", "stopped", "--quiet")  # from its own checkpoint: the flag may be left out
    assert [record["step"] for record in records(folder / "stopped")] == list(range(HALF + 1, STEPS + 1))
    run = json.loads((folder / "stopped" / "run.json").read_text())
    assert run["init_from"] == state.name
    began = json.loads((folder / "whole-jax" / "run.json").read_text())
    assert run["fingerprints"] == began["fingerprints"], "it is still that run"


def broken(folder: Path, state: Path, name: str, change: Any) -> str:
    copy = folder / name
    shutil.copytree(state, copy)
    change(copy)
    return name


def test_what_cannot_be_continued_is_one_line(folder: Path, whole: dict[str, Path]) -> None:
    state = exported(folder, "jax", "whole-jax", "state-wrong", "--step", str(HALF))

    def flip(copy: Path) -> None:
        path = copy / "average.safetensors"
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)

    flipped = broken(folder, state, "flipped", flip)
    for words, complaint in (
        (("--init-from", "nowhere"), "neither an export"),
        (("--init-from", "whole-jax"), "python -m jaxtrain.export whole-jax --to DIR"),
        (("--init-from", "whole-jax/checkpoints/150"), "is a checkpoint of jaxtrain; export it first"),
        (("--init-from", flipped), "average.safetensors has another SHA-256"),
        (("--init-from", state.name, "optimizer.beta1=0.8"), "optimizer.beta1 was 0.9, is 0.8"),
        (("--init-from", state.name, "data.source.files=corpus/[0-8].txt"), "fingerprint"),
    ):
        done = train(folder, "torch", "refused", *words)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.startswith("error: ") and complaint in last
    assert not (folder / "refused").exists(), "nothing is left of what was refused"


def test_an_export_that_cannot_be_made_is_one_line(folder: Path, whole: dict[str, Path]) -> None:
    (folder / "full").mkdir()
    (folder / "full" / "x").touch()
    for run, to, words, complaint in (
        ("nowhere", "out", (), "no such run directory"),
        ("whole-torch", "out", (), "the same command of torchtrain"),
        ("whole-jax", "full", (), "is not empty"),
        ("whole-jax", "out", ("--step", "7"), "holds no checkpoint of step 7; the nearest is 150"),
        ("whole-jax", "recipe.yaml/out", (), "cannot be written"),
        ("whole-jax", "out", ("--weights", "average"), "belongs to --format huggingface"),
    ):
        done = export(folder, "jax", run, to, *words)
        assert done.returncode == 2 and done.stderr.startswith("error: "), done.stderr
        assert complaint in done.stderr and done.stderr.count("\n") == 1
    assert not list(folder.glob("*out*"))


def test_a_run_is_not_begun_again_with_other_weights(folder: Path, whole: dict[str, Path]) -> None:
    """A process that was killed before its first checkpoint left a directory that says how it began."""
    state = exported(folder, "jax", "whole-jax", "state-begun", "--step", str(HALF))
    run = trained(folder, "torch", "begun", "--quiet", "--init-from", state.name, "--stop-at-step", "155")
    shutil.rmtree(run / "checkpoints")
    done = train(folder, "torch", "begun")
    assert done.returncode == 2 and f"began with --init-from {state.name}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_export_has_one_tensor_in_memory(folder: Path, backend: str) -> None:
    """Anonymous memory of the process while it exports, above what it had just before: less than the largest tensor
    and 10%. There are two of that size among others."""
    model = {"vocab_size": 16384, "hidden_size": 2048, "intermediate_size": 2048}
    words = [f"model.{key}={value}" for key, value in model.items()]
    words += ["batch.global_batch=1", "evaluation.max_rows=1"]
    sgd = "optimizer={name: sgd, momentum: 0.0, weight_decay: 0.0, clip_norm: null}"
    run = trained(folder, backend, f"large-{backend}", "--quiet", *words, sgd, "precision=float32", "--stop-at-step=1")
    script = """
import re, sys, threading, time
from pathlib import Path
import importlib
from shared.handover import write_handover
from shared.stored_run import open_stored_run
name, path, to = sys.argv[1:]
framework = getattr(importlib.import_module(f"{name}train.framework"), name.capitalize())()
run = open_stored_run(Path(path), None, framework)
state = run.state(framework)
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
state.read("parameters", run.spec.parameters[1])  # what a first read sets up, once
before, peak, done = anonymous(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.0005)
thread = threading.Thread(target=watch)
thread.start()
write_handover(Path(to), state, run.spec, run.checkpoint.manifest)
done = True
thread.join()
print(peak - before)
"""
    command = [sys.executable, "-c", script, backend, str(run), str(folder / f"large-state-{backend}")]
    # What is freed goes back to the system at once, instead of when the C library sees fit: used memory is measured.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    arrays = load_file(folder / f"large-state-{backend}" / "parameters.safetensors")
    largest = max(array.nbytes for array in arrays.values())
    assert largest == 4 * 16384 * 2048 and sum(array.nbytes for array in arrays.values()) > 2 * largest
    assert int(done.stdout) < 1.1 * largest


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_that_is_read_has_one_or_two_tensors_in_the_hosts_memory(backend: str, tmp_path: Path) -> None:
    """What NumPy holds while a state is put on its devices, whose own memory is not NumPy's. JAX lets go of an array a
    moment after it was read, when the next one may be there."""
    model = {"vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 256}
    config = recipe(model=LLAMA | model, optimizer=ADAMW | {"ema_decay": 0.9})
    spec = model_spec(config.model)

    class Complete(FirstDraws):
        roles = ("parameters", "average", "first_moment", "second_moment")

    facts = {"backend": "jax", "step": 3, "recipe": recipe_of(config), "recipe_hash": recipe_hash(config)}
    write_handover(tmp_path / "state", Complete(0), spec, facts | {"fingerprints": {}, "init_from": None})
    with backends.make(backend, config) as made:
        made.create_state()  # what is compiled or set up once
        source = HandOver(tmp_path / "state", config, spec)
        tracemalloc.start()
        state = made.create_state(source)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        for name, array in made.export_arrays(state):
            assert np.array_equal(array, source.read("parameters", spec.parameter(name))), name
    largest = max(4 * math.prod(parameter.shape) for parameter in spec.parameters)
    assert 4 * spec.num_parameters > 6 * largest
    assert 0.9 * largest < peak < (2.1 if backend == "jax" else 1.1) * largest
