"""How fast batches of 32 rows of 1,024 tokens are read, for each way of packing documents.

    python tests/bench/loader.py [--tokens 64000000] [--seconds 2]

Synthetic documents of 2,000 bytes on average go through the whole pipeline into a temporary cache; then batches are
read in training order, on one thread. Prints tokens a second; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from shared.config.schema import Config
from shared.data import Data, open_data

ROWS, LENGTH = 32, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64_000_000, help="size of the corpus")
    parser.add_argument("--seconds", type=float, default=2.0, help="time spent on each way of packing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_documents(Path(folder, "documents.jsonl"), arguments.tokens)
        speeds = {}
        for packing in ("stream", "segments", "pad"):
            data = open_data(config(folder, packing))
            speeds[packing] = round(measure(data, arguments.seconds))
            print(f"{packing:<9} {speeds[packing] / 1e6:8.1f} M tokens/s")
    print(json.dumps(speeds))


def write_documents(path: Path, num_tokens: int) -> None:
    draws = np.random.default_rng(0)
    letters = draws.integers(ord("a"), ord("z") + 1, num_tokens, np.uint8).tobytes().decode()
    with path.open("w") as file:
        start = 0
        while start < num_tokens:
            length = 1 + int(draws.exponential(2000))
            file.write(json.dumps({"text": letters[start : start + length]}) + "\n")
            start += length


def measure(data: Data, seconds: float) -> float:
    """Tokens a second: the median over rounds of 100 batches."""
    data.batch(0)
    rounds, step, ends = [], 0, time.perf_counter() + seconds
    while time.perf_counter() < ends:
        started = time.perf_counter()
        for _ in range(100):
            data.batch(step)
            step += 1
        rounds.append(100 * ROWS * LENGTH / (time.perf_counter() - started))
    return statistics.median(rounds)


def config(folder: str, packing: str) -> Config:
    values: dict[str, Any] = {
        "seed": 0,
        "model": {
            "family": "gpt2",
            "vocab_size": 257,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "max_position_embeddings": LENGTH,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "initializer_range": 0.02,
        },
        "data": {
            "source": {"kind": "jsonl", "files": f"{folder}/documents.jsonl"},
            "tokenizer": {"kind": "bytes"},
            "packing": packing,
            "held_out_fraction": 0.01,
            "cache_dir": f"{folder}/cache",
        },
        "optimizer": {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip_norm": None},
        "schedule": {"name": "constant", "steps": 1, "learning_rate": 0.1, "warmup_steps": 0},
        "batch": {"global_batch": ROWS, "sequence_length": LENGTH},
        "precision": "float32",
    }
    return Config.model_validate(values)


if __name__ == "__main__":
    main()
