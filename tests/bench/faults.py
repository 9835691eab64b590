"""``python tests/bench/faults.py``: runs that are killed at random moments end as if nothing had happened.

A run of each backend is killed with SIGKILL, as a machine that fails would, and started again by the same command,
until it was killed often enough; then it ends. Some kills come while the process starts, some after a random number of
steps, some while a checkpoint is being written. Its final state must equal that of a run that nobody disturbed, bit
for bit, and so must every recorded loss. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

STEPS_A_KILL = 24
"""As many as a process trains at most before it is killed."""

MOMENTS = {"start": 0.2, "steps": 0.4, "save": 0.4}
"""When a kill comes, and how often: while the process starts, after some steps, while it writes a checkpoint."""

PATIENCE = 180.0
"""Seconds after which a process is taken to hang."""

RECIPE: dict[str, Any] = {
    "seed": 0,
    "model": {
        "family": "llama",
        "vocab_size": 257,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
    },
    "data": {
        "source": {"kind": "speeches"},
        "tokenizer": {"kind": "bytes"},
        "packing": "segments",
        "held_out_fraction": 0.1,
        "cache_dir": "cache",
    },
    "optimizer": {
        "name": "adamw",
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "ema_decay": 0.99,
    },
    "batch": {"global_batch": 8, "sequence_length": 128},
    "precision": "float32",
    "evaluation": {"max_rows": 16},
    "checkpoint": {"every": 4, "keep": 2},
    "logging": {"every": 1},
}


@dataclass
class Life:
    """What the kills of one backend did."""

    kills: int = 0
    lost_steps: int = 0
    """Steps that were recorded, and had to be trained again."""
    moments: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MOMENTS, 0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=25, metavar="N", help="for each backend (default: 25)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments (default: 0)")
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        schedule = {"name": "constant", "steps": 2 * STEPS_A_KILL * (arguments.kills + 1), "learning_rate": 1e-3}
        recipe = RECIPE | {"schedule": schedule | {"warmup_steps": 0}}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        for backend in ("jax", "torch"):
            results[backend] = bench(backend, folder, arguments.kills, random.Random(arguments.seed))
    print(json.dumps(results))
    return 0 if all(result["equal"] for result in results.values()) else 1


def bench(backend: str, folder: Path, kills: int, rng: random.Random) -> dict[str, Any]:
    undisturbed, disturbed = folder / f"{backend}-undisturbed", folder / f"{backend}-disturbed"
    started = time.perf_counter()
    finish(start(backend, folder, undisturbed))
    startup = json.loads((undisturbed / "run.json").read_text())["summary"]["startup_seconds"]
    print(f"{backend}: undisturbed in {time.perf_counter() - started:.0f} s", flush=True)

    life = Life()
    while life.kills < kills:
        process = start(backend, folder, disturbed)
        moment = rng.choices(list(MOMENTS), weights=list(MOMENTS.values()))[0]
        wait_for(moment, process, disturbed, rng, startup)
        if process.poll() is not None:
            raise SystemExit(f"{backend}: the run ended by itself after {life.kills} kills: {process.communicate()[1]}")
        process.send_signal(signal.SIGKILL)
        process.communicate()
        life.kills += 1
        life.moments[moment] += 1
        life.lost_steps += max(0, last_step(disturbed) - newest_checkpoint(disturbed))
        print(
            f"{backend}: kill {life.kills} ({moment}) at step {last_step(disturbed)}, checkpoint "
            f"{newest_checkpoint(disturbed)}",
            flush=True,
        )
    finish(start(backend, folder, disturbed))

    exports = [export(backend, folder, run) for run in (undisturbed, disturbed)]
    states = [{path.name: path.read_bytes() for path in sorted(x.glob("*.safetensors"))} for x in exports]
    equal = states[0] == states[1] and losses(undisturbed) == losses(disturbed)
    moments = ", ".join(f"{count} in {moment}" for moment, count in life.moments.items())
    print(
        f"{backend}: {life.kills} kills ({moments}), {life.lost_steps} steps trained again, equal: {equal}", flush=True
    )
    return {"kills": life.kills, "lost_steps": life.lost_steps, "equal": equal}


def start(backend: str, folder: Path, run: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"{backend}train", "--config", "recipe.yaml", "--run-dir", run.name, "--quiet"]
    # Programs that were compiled once are kept, so that a start takes seconds.
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> None:
    error = process.communicate(timeout=1800)[1]
    if process.returncode != 0:
        raise SystemExit(f"a run failed: {error}")


def wait_for(moment: str, process: subprocess.Popen[str], run: Path, rng: random.Random, startup: float) -> None:
    """Return at the moment, or when the process has ended."""
    if moment == "start":
        time.sleep(rng.uniform(0.0, 2.0 + startup))
        return
    deadline = time.monotonic() + PATIENCE

    def until(happened: Callable[[], bool]) -> None:
        while not happened() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.0002)

    begun, written = newest_checkpoint(run), modified(run / "run.json")
    until(lambda: modified(run / "run.json") > written)
    time.sleep(0.1)  # until what was recorded beyond the checkpoint is cut off
    steps = rng.randint(1, STEPS_A_KILL)
    until(lambda: last_step(run) >= begun + steps)
    if moment == "steps":
        time.sleep(rng.uniform(0.0, 0.05))
    else:
        before = set(partial(run))
        until(lambda: bool(set(partial(run)) - before))
        time.sleep(rng.uniform(0.0, 0.01))


def partial(run: Path) -> list[Path]:
    """Checkpoints that are being written."""
    return list((run / "checkpoints").glob(".partial-*"))


def modified(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def last_step(run: Path) -> int:
    """The newest step in the records, or 0."""
    try:
        lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    return max((json.loads(line)["step"] for line in lines if line.endswith(b"\n")), default=0)


def newest_checkpoint(run: Path) -> int:
    return max((int(path.name) for path in (run / "checkpoints").glob("[0-9]*")), default=0)


def losses(run: Path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]


def export(backend: str, folder: Path, run: Path) -> Path:
    to = folder / f"{run.name}-state"
    command = [sys.executable, "-m", f"{backend}train.export", run.name, "--to", to.name]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=300)
    return to


if __name__ == "__main__":
    sys.exit(main())
