"""The ladder of one recipe, and the climb."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.config.schema import Config
from shared.parity import rungs
from shared.parity.jobs import BACKENDS, Done, Job, Runner
from shared.parity.rungs import FLOAT32_LIMIT, Rung, Verdict


@dataclass(frozen=True)
class Length:
    """Steps of the runs on the ladder."""

    full: int = 300
    """In float64 and float32."""
    sgd: int = 50
    half: int = 20
    """In half precision, which a CPU computes slowly."""
    short: int = 6
    """Where the first steps tell."""

    def within(self, steps: int) -> Length:
        """No longer than a recipe of that many steps."""
        return Length(*(min(steps, own) for own in (self.full, self.sgd, self.half, self.short)))


def ladder(path: Path, config: Config, overrides: Sequence[str], length: Length) -> list[Rung]:
    """The rungs for a recipe; ``overrides`` are those of the command line."""
    length = length.within(min(length.full, config.schedule.steps))

    def job(
        label: str,
        steps: int,
        *settings: str,
        traced: Sequence[int] = (),
        devices: int = 1,
        resumed_after: int | None = None,
    ) -> Job:
        # Every step is recorded, nothing is saved in between, and what the user said comes before what a rung needs.
        quiet = ("logging={every: 1, tensorboard: false}", "checkpoint.every=null")
        flags = ("--stop-at-step", str(steps), *(word for step in traced for word in ("--trace", str(step))))
        return Job(label, path, (*overrides, *quiet, *settings), flags, devices, resumed_after)

    float64 = job("float64", length.full, "precision=float64", traced=sorted({1, length.full}))
    float32 = job("float32", length.full, "precision=float32", traced=[1])
    optimizer = "{name: sgd, momentum: 0.9, weight_decay: 0.01, clip_norm: 1.0}"
    constant = f"{{name: constant, steps: {length.sgd}, learning_rate: 0.05, warmup_steps: 0}}"
    sgd = job(
        "sgd",
        length.sgd,
        "precision=float32",
        f"optimizer={optimizer}",
        f"schedule={constant}",
        *_no_evaluation(config),
    )
    half = {name: job(name, length.half, f"precision={name}") for name in ("bfloat16", "float16")}
    rows = config.batch.global_batch
    small = f"batch.global_batch={config.parallel.data}"
    # Far above what float16 holds, and quick to grow again: the first updates overflow, and later ones too.
    scale = (
        "precision={preset: float16, loss_scale: {initial: 1.0e12, growth: 1024, backoff: 0.0625, growth_interval: 2}}"
    )
    scales = job("loss-scale", 24, scale, small, "accumulation.microbatch=null", *_no_evaluation(config))
    dtypes = Job("dtypes", path, (*overrides, "precision=bfloat16"), ("--explain", "precision"), trains=False)

    found = [
        rungs.fingerprints(float64),
        rungs.float64_step(float64, [1]),
        rungs.float64(float64, length.full),
        Rung("float32 step", "activations, gradients", (float32,), rungs.same_step(float32, [1], rungs.FLOAT32_STEP)),
        Rung("float32 SGD", f"{length.sgd} updates", (sgd,), rungs.same_losses(sgd, FLOAT32_LIMIT, False)),
        Rung("float32", f"{length.full} updates", (float32,), rungs.same_losses(float32, FLOAT32_LIMIT, False)),
        *(
            Rung(name, f"{length.half} updates, against float32", (job_, float32), rungs.same_rounding(job_, float32))
            for name, job_ in half.items()
        ),
        rungs.loss_scale(scales),
        rungs.formats(dtypes),
    ]

    microbatch = max((d for d in range(1, rows // 2 + 1) if (rows // config.parallel.data) % d == 0), default=1)
    cut = (
        f"accumulation.microbatch={microbatch}",
        "remat=matmuls",
        "execution.jax.layers=scan",
        f"execution.vocab_chunk={max(1, config.model.vocab_size // 3)}",
        "offload.optimizer=host",
    )
    execution = job("execution", length.short, "precision=float64", *cut, traced=[1])
    found.append(rungs.invariant("microbatch, remat, chunked loss, offload", execution, float64))
    if config.parallel.data == 1 and rows % 2 == 0:
        replicas = job(
            "replicas", length.short, "precision=float64", "parallel.data=2", "accumulation.microbatch=null", devices=2
        )
        found.append(rungs.invariant("two devices, one device", replicas, float64))
    if length.short > 1:
        resumed = job("resumed", length.short, "precision=float64", resumed_after=length.short // 2)
        found.append(rungs.invariant("stopped and resumed, never stopped", resumed, float64))
    return found


def _no_evaluation(config: Config) -> tuple[str, ...]:
    return ("evaluation.every=null",) if config.evaluation.every is not None else ()


def jobs_of(rungs_: Sequence[Rung]) -> list[Job]:
    """Every job once, in the order in which the rungs need them."""
    return list({job.label: job for rung in rungs_ for job in rung.jobs}.values())


def judge(rung: Rung, results: dict[str, dict[str, Done]]) -> Verdict:
    """The rung's verdict; a job that did not end well is one too."""
    for job in rung.jobs:
        for backend in BACKENDS:
            done = results[job.label][backend]
            if job.trains and not done.ok:
                return Verdict(float("inf"), 0.0, False, f"{backend}train failed: {_last_words(done)}", "run")
    return rung.judge(results)


def climb(
    rungs_: Sequence[Rung],
    runner: Runner,
    results: dict[str, dict[str, Done]],
    watch: Callable[[Job, str], None] = lambda job, backend: None,
) -> Iterator[tuple[Rung, Verdict]]:
    """Run what the rungs need, both backends side by side, and give each verdict as soon as it is known.

    ``results`` is filled with what the jobs left; ``watch`` is told of every job that starts.
    """
    jobs = jobs_of(rungs_)
    finished: queue.Queue[Done | BaseException] = queue.Queue()
    stop = threading.Event()

    def work(backend: str) -> None:
        try:
            for job in jobs:
                if stop.is_set():
                    return
                watch(job, backend)
                finished.put(runner.run(backend, job))
        except BaseException as error:  # handed to the caller's thread
            finished.put(error)

    threads = [threading.Thread(target=work, args=(backend,), daemon=True) for backend in BACKENDS]
    for thread in threads:
        thread.start()
    results |= {job.label: {} for job in jobs}
    try:
        for rung in rungs_:
            while any(len(results[job.label]) < len(BACKENDS) for job in rung.jobs):
                done = finished.get()
                if isinstance(done, BaseException):
                    raise done
                results[done.job.label][done.backend] = done
            yield rung, judge(rung, results)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _last_words(done: Done) -> str:
    lines = [line for line in done.output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("error:", "stopped:"))]
    return (errors or lines or ["it printed nothing"])[-1]
