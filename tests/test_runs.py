"""Whole runs through the command line, as a person starts them: the same run, resumed, interrupted, compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.backends import BACKENDS
from tests.recipes import ADAMW, LLAMA

# A two-layer model on bytes of the packaged speeches: small enough for 300 steps in seconds.
RECIPE: dict[str, Any] = {
    "seed": 3,
    "model": LLAMA | {"vocab_size": 257, "initializer_range": 0.05},
    "data": {
        "source": {"kind": "text", "files": "corpus/*.txt"},
        "tokenizer": {"kind": "bytes"},
        "packing": "segments",
        "held_out_fraction": 0.1,
        "cache_dir": "cache",
    },
    "optimizer": ADAMW | {"ema_decay": 0.99},
    "schedule": {
        "name": "cosine",
        "steps": 300,
        "learning_rate": 3e-3,
        "warmup_steps": 20,
        "final_learning_rate": 3e-4,
    },
    "batch": {"global_batch": 8, "sequence_length": 32},
    "precision": "float64",
    "evaluation": {"max_rows": 16},
    "logging": {"every": 1},
}


def working_folder(folder: Path, recipe: dict[str, Any]) -> Path:
    """The folder, with twelve short documents and that recipe in it."""
    (folder / "corpus").mkdir()
    rng = np.random.default_rng(0)
    words = ["the", "union", "state", "of", "our", "people", "and", "nation", "will", "not", "be", "moved", "by", "war"]
    for number in range(12):
        (folder / "corpus" / f"{number}.txt").write_text(" ".join(rng.choice(words, size=900)))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return working_folder(tmp_path_factory.mktemp("runs"), RECIPE)


def train(folder: Path, backend: str, run: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(backend, run, *words), cwd=folder, text=True, capture_output=True, timeout=300)


def command(backend: str, run: str, *words: str) -> list[str]:
    return [sys.executable, "-m", f"{backend}train", "--config", "recipe.yaml", "--run-dir", run, *words]


def trained(folder: Path, backend: str, run: str, *words: str) -> Path:
    done = train(folder, backend, run, *words)
    assert done.returncode == 0, done.stderr
    return folder / run


def records(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(run: Path) -> np.ndarray:
    return np.array([record["loss"] for record in records(run)])


def parameters(folder: Path, run: Path) -> dict[str, np.ndarray]:
    """Canonical parameters of a run's newest checkpoint, read by the backend that wrote it, in a child process."""
    script = (
        "import importlib, json, sys, numpy as np\n"
        "from pathlib import Path\n"
        "from shared.stored_run import open_stored_run\n"
        "run = Path(sys.argv[1]); name = json.loads((run / 'run.json').read_text())['backend']\n"
        "framework = getattr(importlib.import_module(f'{name}train.framework'), name.capitalize())()\n"
        "found = open_stored_run(run, None, framework); state = found.state(framework)\n"
        "np.savez(sys.argv[2], **{p.name: state.read('parameters', p) for p in found.spec.parameters})\n"
    )
    target = folder / f"{run.name}.npz"
    subprocess.run([sys.executable, "-c", script, run, target], cwd=folder, check=True, timeout=120)
    with np.load(target) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def float64_runs(folder: Path) -> dict[str, Path]:
    return {backend: trained(folder, backend, f"float64-{backend}", "--quiet") for backend in BACKENDS}


def compare(*arguments: object) -> tuple[int, dict[str, Any], str]:
    with_json = [*map(str, arguments), "--json", str(Path(str(arguments[0])) / "comparison.json")]
    done = subprocess.run(
        [sys.executable, "-m", "shared.compare", *with_json], text=True, capture_output=True, timeout=60
    )
    return done.returncode, json.loads(Path(with_json[-1]).read_text()), done.stdout


def test_in_float64_both_backends_train_the_same_run(folder: Path, float64_runs: dict[str, Path]) -> None:
    """300 AdamW steps: 1e-12 in the loss and 1e-10 in the parameters leave no room for a difference in meaning."""
    jax, torch = (losses(float64_runs[backend]) for backend in BACKENDS)
    assert len(jax) == 300 and jax[-1] < 0.7 * jax[0], "the model must have learnt something"
    assert np.max(np.abs(jax - torch) / torch) <= 1e-12
    ours, theirs = (parameters(folder, float64_runs[backend]) for backend in BACKENDS)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert value.dtype == np.float64
        assert np.max(np.abs(ours[name] - value)) / np.max(np.abs(value)) <= 1e-10, name
    held_out = [records(float64_runs[backend], "evaluation")[-1]["held_out_loss"] for backend in BACKENDS]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-12)


def test_compare_calls_them_the_same_run(float64_runs: dict[str, Path]) -> None:
    status, result, text = compare(float64_runs["jax"], float64_runs["torch"])
    assert (status, result["same_run"], result["reasons"]) == (0, True, [])
    assert result["loss"]["steps_compared"] == 300
    assert "Same run" in text


def test_in_float32_the_losses_agree_to_1e_4_on_average(folder: Path) -> None:
    runs = [trained(folder, backend, f"float32-{backend}", "--quiet", "precision=float32") for backend in BACKENDS]
    status, result, _ = compare(*runs)
    assert status == 0 and result["loss"]["steps_compared"] == 300
    assert result["loss"]["mean_abs_diff"] <= 1e-4


def test_compare_says_what_makes_two_runs_different(folder: Path, float64_runs: dict[str, Path]) -> None:
    other = trained(folder, "torch", "other-seed", "--quiet", "seed=4", "schedule.steps=20")
    status, result, text = compare(float64_runs["torch"], other)
    assert (status, result["same_run"]) == (1, False)
    assert "seed" in text and "schedule.steps" in text


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_trains(folder: Path, backend: str, precision: str) -> None:
    run = trained(
        folder, backend, f"{precision}-{backend}", "--quiet", f"precision={precision}", "--stop-at-step", "60"
    )
    assert losses(run)[-5:].mean() < 0.9 * losses(run)[0]
    assert all(("loss_scale" in record) == (precision == "float16") for record in records(run))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_resumed_run_is_bit_for_bit_the_run_that_was_never_stopped(folder: Path, backend: str) -> None:
    """With everything that has state: moments, average, loss scale, ragged segments, an epoch's end."""
    words = ("precision=float16", "schedule.steps=24", "batch.global_batch=64", "--quiet")
    whole = trained(folder, backend, f"whole-{backend}", *words)
    parts = folder / f"parts-{backend}"
    for stop in ("7", "15", "24"):
        trained(folder, backend, parts.name, *words, "--stop-at-step", stop, "accumulation.microbatch=64")
    keep = ("step", "loss", "grad_norm", "learning_rate", "tokens", "batch", "loss_scale", "skipped")
    ours, theirs = ([{k: record[k] for k in keep} for record in records(run)] for run in (parts, whole))
    assert ours == theirs
    assert records(parts, "evaluation") == records(whole, "evaluation")
    again, before = parameters(folder, parts), parameters(folder, whole)
    assert all(np.array_equal(again[name], before[name]) for name in before)
    assert len({record["batch"] for record in records(whole)}) == 24


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_says_how_to_go_on_and_exits_with_0(
    folder: Path, backend: str, number: signal.Signals
) -> None:
    run = folder / f"{number.name}-{backend}"
    words = ("schedule.steps=100000", "precision=float32")
    process = subprocess.Popen(command(backend, run.name, *words), cwd=folder, text=True, stderr=subprocess.PIPE)
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 0, text
    step = int(next(path.name for path in (run / "checkpoints").iterdir()))
    assert f"stopped by {number.name} after step {step}" in text and "run the same command to go on" in text
    assert records(run)[-1]["step"] == step, "nothing that was trained is left out of the record"

    trained(folder, backend, run.name, *words, "--quiet", "--stop-at-step", str(step + 3))
    assert [record["step"] for record in records(run)] == list(range(1, step + 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_ctrl_c_ends_the_run_at_once_and_loses_nothing_that_was_saved(folder: Path, backend: str) -> None:
    run = folder / f"twice-{backend}"
    words = ("schedule.steps=100000", "precision=float32", "checkpoint.every=2", "checkpoint.keep=1")
    process = subprocess.Popen(command(backend, run.name, *words), cwd=folder, text=True, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (run / "checkpoints" / "2").exists() and not list(run.glob("checkpoints/[0-9]*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGSTOP)  # so that both signals arrive before the first one's work is done
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    os.kill(process.pid, signal.SIGCONT)
    process.communicate(timeout=60)
    assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    done = train(folder, backend, run.name, *words, "--quiet", "--stop-at-step", "1")
    assert done.returncode == 0 and "already trained to step" in done.stdout


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_directory_of_something_else_is_refused(
    folder: Path, backend: str, float64_runs: dict[str, Path]
) -> None:
    other = next(name for name in BACKENDS if name != backend)
    taken = train(folder, backend, float64_runs[other].name)
    assert taken.returncode == 2
    assert f"holds a run of {other}train" in taken.stderr and taken.stderr.count("\n") == 1
    changed = train(folder, backend, float64_runs[backend].name, "batch.global_batch=4")
    assert changed.returncode == 2
    assert "batch.global_batch was 8, is 4" in changed.stderr and changed.stderr.count("\n") == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_that_diverges_says_so_and_exits_with_1(folder: Path, backend: str) -> None:
    words = ("precision=float32", "optimizer={name: sgd, momentum: 0.0, weight_decay: 0.0, clip_norm: null}")
    done = train(folder, backend, f"diverged-{backend}", *words, "schedule.learning_rate=1e30")
    assert done.returncode == 1, done.stderr
    assert "stopped: step" in done.stderr and "not finite" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_help_and_wrong_configs_import_no_framework(folder: Path, backend: str) -> None:
    for words, status in ((["--help"], 0), (["--config", "recipe.yaml", "no.such=1"], 2)):
        script = (
            f"import sys, runpy; sys.argv = ['x', *{words!r}]\n"
            f"try: runpy.run_module('{backend}train', run_name='__main__')\n"
            "except SystemExit as end: status = end.code or 0\n"
            "heavy = {'jax', 'torch', 'flax', 'optax', 'orbax', 'tensorboard', 'pyarrow', 'tokenizers', 'matplotlib'}\n"
            "print(sorted(heavy & set(sys.modules)), status, 'pydantic' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", script], cwd=folder, text=True, capture_output=True, timeout=60)
        assert done.stdout.splitlines()[-1] == f"[] {status} {status == 2}"
