"""Memory and time of the loss and its gradients: from all logits at once, and from chunks of the vocabulary.

    python tests/bench/loss.py [--vocabulary 50257] [--hidden 256] [--chunks 8192 4096 1024] [--precision float32]

Prints one Markdown table. Memory is what exists at once beyond the inputs, the gradients that come out included. JAX's
is what the compiler plans (temporaries and outputs), PyTorch's the largest sum of living storages that a dispatch mode
sees. Ratios are to all logits in the same framework. Time is the shortest of a few calls, on one thread in PyTorch.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxtrain import loss as in_jax
from tests.bench.living import Living
from torchtrain import loss as in_torch

MiB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--chunks", type=int, nargs="+", default=[8192, 4096, 1024])
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    shape = options.rows, options.length
    hidden_BTC = rng.standard_normal((*shape, options.hidden), np.float32)
    head_VC = 0.02 * rng.standard_normal((options.vocabulary, options.hidden), np.float32)
    targets_BT = rng.integers(0, options.vocabulary, shape, np.int32)
    arrays = hidden_BTC, head_VC, targets_BT, np.ones(shape, bool)

    print(f"V = {options.vocabulary}, B T = {targets_BT.size}, C = {options.hidden}, compute in {options.precision}\n")
    print("| logits at once | JAX MiB | ratio | ms | PyTorch MiB | ratio | ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    whole: list[float] = []
    for chunk in (None, *options.chunks):
        cells, measured = [], [measure(*arrays, chunk, options) for measure in (measure_jax, measure_torch)]
        whole = whole or [peak for peak, _ in measured]
        for (peak, seconds), all_logits in zip(measured, whole, strict=True):
            cells += [f"{peak / MiB:,.0f}", f"{peak / all_logits:.2f}", f"{1000 * seconds:,.0f}"]
        print(f"| {f'{chunk:,}' if chunk else 'all'} | {' | '.join(cells)} |", flush=True)


def measure_jax(
    hidden: np.ndarray, head: np.ndarray, targets: np.ndarray, mask: np.ndarray, chunk: int | None, options: Any
) -> tuple[float, float]:
    """(bytes, seconds)."""
    compute, islands = jnp.dtype(options.precision), jnp.float32

    def loss(hidden_BTC: jax.Array, head_VC: jax.Array) -> jax.Array:
        if chunk is not None:
            return in_jax.chunked_cross_entropy_sum(hidden_BTC, head_VC, targets, mask, chunk, compute, islands)
        logits_BTV = jnp.einsum("btc,vc->btv", hidden_BTC, head_VC.astype(compute))
        return in_jax.cross_entropy_sum(logits_BTV, targets, mask, islands)

    inputs = jnp.asarray(hidden, compute), jnp.asarray(head)
    with jax.default_matmul_precision("highest"):
        step = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*inputs).compile()
    memory: Any = step.memory_analysis()
    seconds = shortest(lambda: jax.block_until_ready(step(*inputs)), options.repeats)
    return memory.temp_size_in_bytes + memory.output_size_in_bytes, seconds


def measure_torch(
    hidden: np.ndarray, head: np.ndarray, targets: np.ndarray, mask: np.ndarray, chunk: int | None, options: Any
) -> tuple[float, float]:
    """(bytes, seconds)."""
    torch.set_num_threads(1)
    compute, islands = getattr(torch, options.precision), torch.float32
    hidden_BTC = torch.from_numpy(hidden).to(compute, copy=True).requires_grad_()
    head_VC = torch.from_numpy(head).clone().requires_grad_()
    targets_BT, mask_BT = torch.from_numpy(targets).long(), torch.from_numpy(mask)

    def loss() -> torch.Tensor:
        if chunk is not None:
            return in_torch.chunked_cross_entropy_sum(hidden_BTC, head_VC, targets_BT, mask_BT, chunk, compute, islands)
        logits_BTV = in_torch.head_product(hidden_BTC, head_VC, compute)
        return in_torch.cross_entropy_sum(logits_BTV, targets_BT, mask_BT, islands)

    def step() -> None:
        # As in the backend, the logits' own name is gone before the backward pass.
        hidden_BTC.grad = head_VC.grad = None
        loss().backward()

    with Living() as living:
        step()
    return living.peak, shortest(step, options.repeats)


def shortest(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of a few calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
