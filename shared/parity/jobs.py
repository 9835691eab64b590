"""The runs that a ladder needs, each a child process of one backend.

The ladder imports no framework: it starts ``python -m jaxtrain`` or ``python -m torchtrain``, and reads the run
directory that this leaves. One run serves every rung that asks for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared.run_directory import Metrics, RunDirectory
from shared.trace import read_trace

BACKENDS = ("jax", "torch")


@dataclass(frozen=True)
class Job:
    """One run of one backend: a config with overrides, and flags of the command line."""

    label: str
    """Names the run directory."""
    config: Path
    overrides: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    devices: int = 1
    """Devices of JAX, or processes of PyTorch."""
    resumed_after: int | None = None
    """Stop after this step, then go on in a second process."""
    trains: bool = True
    """Whether it leaves a run directory, rather than only an exit status and what it prints."""


@dataclass(frozen=True)
class Done:
    """What a job left."""

    job: Job
    backend: str
    directory: Path
    status: int
    output: str
    """What it printed, on both streams."""

    @property
    def ok(self) -> bool:
        return self.status == 0

    @property
    def crashed(self) -> bool:
        """Whether it ended in an error of the program, rather than of the run or the user."""
        return "Traceback (most recent call last)" in self.output

    def metrics(self) -> Metrics:
        return RunDirectory(self.directory).read_metrics()

    def column(self, name: str) -> dict[int, float]:
        """A figure of the training steps, by step."""
        return {record["step"]: float(record[name]) for record in self.metrics().train if name in record}

    def held_out(self) -> dict[int, float]:
        return {record["step"]: float(record["held_out_loss"]) for record in self.metrics().evaluation}

    def fingerprints(self) -> Mapping[str, str]:
        found: Mapping[str, str] = RunDirectory(self.directory).read_run()["fingerprints"]
        return found

    def batches(self) -> dict[int, str]:
        return {record["step"]: record["batch"] for record in self.metrics().train}

    def trace(self, step: int) -> dict[str, np.ndarray]:
        return read_trace(self.directory / "traces" / f"{step}.npz")

    def traced_steps(self) -> list[int]:
        return sorted(int(path.stem) for path in (self.directory / "traces").glob("*.npz"))


@dataclass(frozen=True)
class Runner:
    """Starts jobs, and keeps what they leave below one folder."""

    work: Path
    mutant: str | None = None
    """A mutant whose patch every child applies; see :mod:`shared.parity.mutated`."""
    threads: int | None = None
    """Threads of a child, where several run side by side."""
    overrides: tuple[str, ...] = ()
    """Settings of every job."""

    def directory(self, backend: str, job: Job) -> Path:
        return self.work / f"{job.label}-{backend}"

    def run(self, backend: str, job: Job) -> Done:
        """Run it to its end, unless that was done before."""
        directory = self.directory(backend, job)
        log = directory.with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        stops: list[tuple[str, ...]] = (
            [()] if job.resumed_after is None else [("--stop-at-step", str(job.resumed_after)), ()]
        )
        status = 0
        with log.open("w") as stream:
            for stop in stops:
                command = self.command(backend, job, stop)
                stream.write(f"$ {' '.join(command)}\n")
                stream.flush()
                status = subprocess.run(
                    command, env=self._environment(backend, job), stdout=stream, stderr=subprocess.STDOUT, check=False
                ).returncode
                if status:
                    break
        return Done(job, backend, directory, status, log.read_text(errors="replace"))

    def command(self, backend: str, job: Job, stop: tuple[str, ...] = ()) -> list[str]:
        """The command line of a job."""
        package = (
            [f"{backend}train"] if self.mutant is None else ["shared.parity.mutated", self.mutant, f"{backend}train"]
        )
        launch = ["-m"]
        if backend == "torch" and job.devices > 1:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.devices), "-m"]
        where = ["--run-dir", str(self.directory(backend, job)), "--quiet"] if job.trains else []
        # A later --stop-at-step replaces an earlier one.
        rest = ["--config", str(job.config), *where, *job.flags, *stop, *job.overrides, *self.overrides]
        return [sys.executable, *launch, *package, *rest]

    def _environment(self, backend: str, job: Job) -> dict[str, str]:
        environment = dict(os.environ)
        if self.threads is not None:
            environment["OMP_NUM_THREADS"] = str(self.threads)
        if backend == "jax":
            if job.devices > 1:
                flags = environment.get("XLA_FLAGS", "")
                environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={job.devices}".strip()
            # Many short runs of equal programs: compile each once.
            environment.setdefault("JAX_COMPILATION_CACHE_DIR", str((self.work.parent / "compiled").resolve()))
            environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        return environment
