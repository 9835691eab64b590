"""What remat and chunks of the vocabulary save in memory, and cost in time, for one model in both backends.

    PYTHONPATH=. python tests/bench/memory.py [--layers scan|unroll]

Prints one Markdown table. Memory is the peak of what a gradient of one microbatch needs beside parameters and their
gradients: in JAX what the compiled program plans for temporaries, in PyTorch the largest sum of living storages made
after the first step. JAX scans over its layers, as on an accelerator: where they are unrolled, which is faster on a
CPU, that compiler keeps most of what remat means to drop. Times are medians of ratios to ``none``, with which each
variant alternates: one machine's, and only to be compared with each other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import torch

from jaxtrain.backend import JaxBackend
from shared.config.schema import Config
from tests.bench.living import Living
from tests.recipes import random_batch, recipe
from torchtrain.backend import TorchBackend

MiB = 2**20
ROUNDS = 3

MODEL = {
    "family": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {},
    "remat: full": {"remat": "full"},
    "remat: {every: 2}": {"remat": {"every": 2}},
    "remat: alternate": {"remat": "alternate"},
    "remat: matmuls": {"remat": "matmuls"},
    "remat: {names: [q, k, v]}": {"remat": {"names": ["q", "k", "v"]}},
    "remat: {names: [context]}": {"remat": {"names": ["context"]}},
    "remat: {budget: 20 MiB}": {"remat": {"budget": "20 MiB"}},
    "vocab_chunk: 1024": {"execution": {"vocab_chunk": 1024}},
    "remat: full, vocab_chunk: 1024": {"remat": "full", "execution": {"vocab_chunk": 1024}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", choices=["scan", "unroll"], default="scan", help="of JAX")
    layers = parser.parse_args().layers
    batch = {"global_batch": 4, "sequence_length": 256}
    configs = {}
    for label, sections in VARIANTS.items():
        execution = sections.get("execution", {}) | {"jax": {"layers": layers}}
        configs[label] = recipe(**{"model": MODEL, "batch": batch} | sections | {"execution": execution})
    peaks: dict[str, list[float]] = {label: [] for label in configs}
    slower: dict[str, list[float]] = {label: [] for label in configs}
    for measure in (in_jax, in_torch):
        plain_peak, plain = measure(configs["none"])
        for label, config in configs.items():
            peak, step = (plain_peak, plain) if label == "none" else measure(config)
            peaks[label].append(peak)
            ratios = [seconds(step) / seconds(plain) for _ in range(ROUNDS)]
            slower[label].append(1.0 if label == "none" else statistics.median(ratios))
    print(f"4 layers, hidden 256, {batch['global_batch']} x {batch['sequence_length']} tokens, float32\n")
    print("| setting | JAX MiB | ratio | time | PyTorch MiB | ratio | time |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for label in configs:
        cells = []
        for backend in (0, 1):
            peak = peaks[label][backend]
            cells += [f"{peak / MiB:,.0f}", f"{peak / peaks['none'][backend]:.2f}", f"{slower[label][backend]:.2f}"]
        print(f"| `{label}` | {' | '.join(cells)} |")
    saved = [1 - peaks["remat: full"][i] / peaks["none"][i] for i in (0, 1)]
    costs = [slower["remat: full"][i] - 1 for i in (0, 1)]
    print(
        f"\nFull remat saves {saved[0]:.0%} of this memory in JAX and {saved[1]:.0%} in PyTorch, and costs "
        f"{costs[0]:.0%} and {costs[1]:.0%} of the time."
    )


def in_jax(config: Config) -> tuple[float, Callable[[], object]]:
    """(bytes, a step)."""
    backend = JaxBackend(config)
    state, rows = backend.create_state(), backend.place(random_batch(config))
    step = jax.jit(backend.gradients).lower(state.parameters, rows).compile()
    memory: Any = step.memory_analysis()
    return memory.temp_size_in_bytes, lambda: jax.block_until_ready(step(state.parameters, rows))


def in_torch(config: Config) -> tuple[float, Callable[[], object]]:
    """(bytes, a step)."""
    backend = TorchBackend(config)
    state, rows = backend.create_state(), backend.place(random_batch(config))

    def step() -> None:
        backend.gradients(state.model, rows)

    step()  # so that the parameters' gradients exist, and are added to
    with Living() as living:
        step()
    return living.peak, step


def seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
