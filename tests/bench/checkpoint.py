"""``python tests/bench/checkpoint.py``: how long training stands still for a checkpoint.

Trains the demo's model, and one of 135 million parameters (SmolLM2's shape), for a few steps with a checkpoint every
few, in both backends, and reads from ``run.json`` how long the loop waited. A checkpoint stops training while the state
is copied; what is left of it is written beside the steps that follow. The share is that of the time between two
checkpoints: for the demo of its own recipe's, for the large model of ten minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"

SMOLLM2 = {
    "family": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.04,
}
"""Its shape; the rows are bytes here, since the numbers do not matter."""

STEPS, EVERY = 60, 20
"""Enough between two saves that the first is written before the second begins."""

TEN_MINUTES = 600.0


def main() -> int:
    demo = yaml.safe_load(DEMO.read_text())
    large = demo | {"model": SMOLLM2, "batch": {"global_batch": 1, "sequence_length": 64}}
    interval = demo["checkpoint"]["every"]
    print(
        f"{'model':<6}{'backend':<9}{'MiB':>8}{'stall a save':>14}{'written in':>12}{'between saves':>15}{'share':>8}"
    )
    results: dict[str, Any] = {}
    for name, recipe in (("demo", demo), ("135M", large)):
        for backend in ("jax", "torch"):
            summary, size = trained(backend, recipe)
            saves = summary["checkpoints"]
            tokens = recipe["batch"]["global_batch"] * recipe["batch"]["sequence_length"]
            between = interval * tokens / summary["tokens_per_s"] if name == "demo" else TEN_MINUTES
            stall, written = (saves[key] / saves["saves"] for key in ("stall_seconds", "writing_seconds"))
            print(
                f"{name:<6}{backend:<9}{size / 2**20:>8,.1f}{stall:>12.3f} s{written:>10.2f} s{between:>13.0f} s"
                f"{stall / between:>8.2%}",
                flush=True,
            )
            results[f"{name} {backend}"] = {"stall_seconds": stall, "share": stall / between}
    print(json.dumps(results))
    return 0


def trained(backend: str, recipe: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """(summary of a run, bytes of a checkpoint of it)."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "recipe.yaml"
        sections = {"checkpoint": {"every": EVERY, "keep": 1}, "evaluation": {"max_rows": 1}}
        config.write_text(yaml.safe_dump(recipe | sections))
        run = Path(folder) / "run"
        words = ["--config", config, "--run-dir", run, "--stop-at-step", str(STEPS), "--quiet"]
        subprocess.run([sys.executable, "-m", f"{backend}train", *map(str, words)], check=True)
        size = sum(path.stat().st_size for path in (run / "checkpoints" / str(STEPS)).rglob("*") if path.is_file())
        return json.loads((run / "run.json").read_text())["summary"], size


if __name__ == "__main__":
    sys.exit(main())
