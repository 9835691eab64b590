"""The hunt: each mutant runs in one backend, the ladder is climbed against the other, and some rung must fail.

The ladder here has the rungs of :mod:`shared.parity.ladder` on two small recipes that together use every rule: one a
Llama with dropout and an average of the parameters, one a GPT-2 with learned positions and momentum. It is first
climbed without a mutant, and must hold; those runs are what the mutants are compared with.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import UserError, nearest
from shared.parity import ladder, rungs
from shared.parity.jobs import BACKENDS, Done, Job, Runner
from shared.parity.mutants import MUTANTS, Mutant
from shared.parity.rungs import Rung, Verdict

SIDE_BY_SIDE = 2
"""Mutants at once, each with one thread."""

COMMON = """\
seed: 0
data:
  source: {kind: jsonl, files: "CORPUS"}
  tokenizer: {kind: bytes}
  packing: segments
  held_out_fraction: 0.2
batch: {global_batch: 6, sequence_length: 40}
precision: float64
accumulation: {microbatch: 3}
evaluation: {max_rows: 10}
logging: {every: 1, tensorboard: false}
"""

LLAMA = """\
model:
  family: llama
  vocab_size: 264
  hidden_size: 32
  intermediate_size: 48
  num_hidden_layers: 2
  num_attention_heads: 4
  num_key_value_heads: 2
  rms_norm_eps: 1e-3
  rope_theta: 100.0
  tie_word_embeddings: false
  initializer_range: 0.2
  dropout: 0.1
optimizer: {name: adamw, beta1: 0.9, beta2: 0.99, eps: 1e-4, weight_decay: 0.3, clip_norm: 0.7, ema_decay: 0.6}
schedule: {name: cosine, steps: 6, learning_rate: 2e-2, warmup_steps: 2, final_learning_rate: 1e-3}
"""

GPT2 = """\
model:
  family: gpt2
  vocab_size: 264
  hidden_size: 32
  intermediate_size: 64
  num_hidden_layers: 2
  num_attention_heads: 4
  max_position_embeddings: 48
  layer_norm_epsilon: 1e-3
  activation_function: gelu_new
  initializer_range: 0.2
optimizer: {name: sgd, momentum: 0.8, nesterov: true, weight_decay: 0.3, clip_norm: 0.7}
schedule: {name: wsd, steps: 6, learning_rate: 5e-2, warmup_steps: 2, decay_steps: 2, final_learning_rate: 1e-3}
"""


@dataclass(frozen=True)
class Caught:
    """What became of a mutant."""

    mutant: Mutant
    rung: str | None
    """The rung that failed first; None when it survived."""
    verdict: Verdict | None

    @property
    def record(self) -> dict[str, Any]:
        """For a program to read."""
        return {
            "name": self.mutant.name,
            "rule": self.mutant.rule,
            "backend": self.mutant.backend,
            "caught": self.rung is not None,
            "rung": self.rung,
            "tensor": self.verdict and self.verdict.tensor,
            "measured": self.verdict and self.verdict.measured,
            "limit": self.verdict and self.verdict.limit,
        }


def hunt(work: Path, only: Sequence[str]) -> list[dict[str, Any]]:
    """Hunt all mutants, or those named; returns a record of each.

    Raises UserError where a name is unknown, or when the ladder does not hold without a mutant.
    """
    names = [mutant.name for mutant in MUTANTS]
    for name in only:
        if name not in names:
            raise UserError(f"--only {name}: no such mutant; {nearest(name, names)}")
    chosen = [mutant for mutant in MUTANTS if not only or mutant.name in only]
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    started = time.monotonic()
    rungs_ = small_ladder(work)
    sound: dict[str, dict[str, Done]] = {}
    for rung, verdict in ladder.climb(
        rungs_, Runner(work / "sound", threads=1, overrides=(f"data.cache_dir={work / 'cache'}",)), sound
    ):
        _say(started, f"without a mutant, {rung.name}: {'holds' if verdict.ok else verdict.detail}")
        if not verdict.ok:
            raise UserError(f"without a mutant, {rung.name} fails: {verdict.detail}; mutants prove nothing then")

    caught: list[Caught] = []
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        for found in pool.map(lambda mutant: _hunt_one(mutant, rungs_, sound, work), chosen):
            caught.append(found)
            where = f"caught by {found.rung}: {found.verdict.tensor}" if found.verdict else "SURVIVED"
            _say(started, f"{len(caught)}/{len(chosen)} {found.mutant.name} ({found.mutant.backend}): {where}")
    _show(caught, time.monotonic() - started)
    return [found.record for found in caught]


def small_ladder(work: Path) -> list[Rung]:
    """The rungs, and the files that their recipes need."""
    corpus = work / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in _documents()))
    llama, gpt2 = work / "llama.yaml", work / "gpt2.yaml"
    for path, text in ((llama, LLAMA), (gpt2, GPT2)):
        path.write_text(COMMON.replace("CORPUS", str(corpus)) + text)
    traced = ("--trace", "1", "--trace", "3", "--trace", "6")
    sound, other = Job("llama", llama, flags=traced), Job("gpt2", gpt2, flags=traced)
    scale = "{preset: float16, loss_scale: {initial: 1.0e9, growth: 256, backoff: 0.0625, growth_interval: 2}}"
    scales = Job("loss-scale", llama, (f"precision={scale}", "schedule.steps=16"))
    half = Job("dtypes", llama, ("precision=bfloat16",), ("--explain", "precision"), trains=False)
    single = Job("dtypes-float32", llama, ("precision=float32",), ("--explain", "precision"), trains=False)
    cut = Job(
        "execution",
        llama,
        (
            "accumulation.microbatch=2",
            "remat=matmuls",
            "execution.jax.layers=scan",
            "execution.vocab_chunk=100",
            "offload.optimizer=host",
        ),
        ("--trace", "1"),
    )
    replicas = Job("replicas", llama, ("parallel.data=2",), devices=2)
    resumed = Job("resumed", llama, resumed_after=3)

    return [
        *(
            rung
            for job in (sound, other)
            for rung in (rungs.fingerprints(job), rungs.float64_step(job, [1, 3]), rungs.float64(job, 6))
        ),
        rungs.loss_scale(scales),
        rungs.formats(half),
        rungs.formats(single),
        *(rungs.invariant("other settings", job, sound) for job in (cut, replicas, resumed)),
    ]


def _documents() -> list[str]:
    """Short documents, so that several share a row and some fill one."""
    random = np.random.default_rng(0)
    alphabet = np.array(list("abcdefgh "))
    return ["".join(random.choice(alphabet, random.integers(1, 60))).strip() or "a" for _ in range(200)]


def _hunt_one(mutant: Mutant, rungs_: Sequence[Rung], sound: dict[str, dict[str, Done]], work: Path) -> Caught:
    # Data that a mutant prepares is its own, and what it compiles too.
    cache = work / "mutants" / mutant.name / "cache"
    runner = Runner(work / "mutants" / mutant.name, mutant.name, threads=1, overrides=(f"data.cache_dir={cache}",))
    other = next(backend for backend in BACKENDS if backend != mutant.backend)
    results: dict[str, dict[str, Done]] = {}
    for rung in rungs_:
        for job in rung.jobs:
            if job.label not in results:
                done = runner.run(mutant.backend, job)
                results[job.label] = {mutant.backend: done, other: sound[job.label][other]}
                if done.crashed:
                    return Caught(mutant, None, None)  # broken, not caught
        verdict = ladder.judge(rung, results)
        if not verdict.ok:
            return Caught(mutant, rung.name, verdict)
    return Caught(mutant, None, None)


def _say(started: float, text: str) -> None:
    print(f"[{time.monotonic() - started:5.0f} s] {text}", file=sys.stderr, flush=True)


def _show(caught: Sequence[Caught], seconds: float) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "mutant", "rule it breaks", "in", "caught by", "first difference", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for found in caught:
        where = (found.rung, found.verdict.tensor) if found.verdict else ("SURVIVED", "")
        style = "" if found.rung else "red"
        table.add_row(found.mutant.name, found.mutant.rule, found.mutant.backend, *where, style=style)
    console = Console()
    if not console.is_terminal:
        console.width = 150
    console.print(table)
    console.print(
        f"{sum(found.rung is not None for found in caught)} of {len(caught)} mutants caught in {seconds:.0f} s"
    )
