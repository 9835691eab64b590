"""The training loop: the only one.

It knows no framework. A :class:`shared.backend.Backend` carries out a step; this module says what happens in which
order. The host waits for the device only where something is read: at a step that is logged (one step late), at an
evaluation and at a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shared.backend import Backend, State
from shared.checkpoint import Checkpoints
from shared.config.schema import Config
from shared.data import Data
from shared.data.loader import Loader
from shared.interrupt import Interrupt
from shared.recorder import Recorder, Unrecorded
from shared.step_log import StepLog
from shared.trace import Trace


@dataclass
class Outcome:
    """How this process's part of a run ended."""

    step: int
    """Completed steps of the whole run."""
    interrupted: str | None
    """The signal that stopped it, or None."""
    seconds: float
    """Wall time from the first dispatch."""
    startup_seconds: float | None
    """Until the first step was done: compilation is in here, and in no rate."""
    tokens_per_s: float | None
    """Over all logged windows."""
    loss: float | None
    """Of the last logged step."""
    held_out: dict[str, float] | None
    """The last evaluation."""

    def summary(self) -> dict[str, Any]:
        """For ``run.json``."""
        return asdict(self)


@dataclass
class Trainer:
    """One run of one backend."""

    config: Config
    backend: Backend
    data: Data
    recorder: Recorder | Unrecorded
    checkpoints: Checkpoints
    facts: dict[str, Any]
    """What a checkpoint's manifest says of the run beside its step."""
    interrupt: Interrupt
    traces: Mapping[int, Path] = field(default_factory=dict)
    """Steps to trace, and the file to write for each."""

    def start(self) -> tuple[State, int]:
        """The state to go on from, and how many steps it has seen."""
        latest = self.checkpoints.latest()
        if latest is None:
            return self.backend.create_state(), 0
        return self.backend.restore(latest.directory), latest.step

    def train(self, state: State, first: int, last: int) -> Outcome:
        """Train from ``first`` completed steps to ``last``, at least one step.

        Raises Diverged when a gradient is not finite; the newest checkpoint is then the one before.
        """
        config, total = self.config, self.config.schedule.steps
        log = StepLog(self.recorder, self.backend.asynchronous)
        held_out: dict[str, float] | None = None
        step, interrupted = first, False

        with Loader(self.data, first, last - first) as loader:
            for index, batch in loader:
                step = index + 1
                trace = Trace(self.backend, state, batch) if step in self.traces else None
                state, metrics = self.backend.train_step(state, batch)
                if trace and self.backend.process == 0:
                    trace.write(state, self.traces[step])
                log.dispatched(
                    step, batch, metrics, logged=step in (first + 1, last) or step % config.logging.every == 0
                )

                interrupted = self.backend.agreed(self.interrupt.requested is not None)
                stopping = step == last or interrupted
                evaluating = step == total or _due(step, config.evaluation.every)
                saving = stopping or _due(step, config.checkpoint.every)
                if evaluating or saving:
                    log.flush()
                    if evaluating:
                        held_out = self._evaluate(state, step) or held_out
                    if saving:
                        self._save(state, step)
                    log.resume()
                if stopping:
                    break

        return Outcome(
            step=step,
            interrupted=self.interrupt.requested or ("a signal to another process" if interrupted else None),
            seconds=log.seconds,
            startup_seconds=log.startup_seconds,
            tokens_per_s=log.tokens_per_s,
            loss=log.last.loss if log.last else None,
            held_out=held_out,
        )

    def _evaluate(self, state: State, step: int) -> dict[str, float] | None:
        """Loss over the held-out rows: all sums first, then one division."""
        batches = self.data.held_out_batches(self.config.evaluation.max_rows)
        pending = [self.backend.eval_step(state, batch) for batch in batches]
        sums = [result.read() for result in pending]
        tokens = sum(part.tokens for part in sums)
        if not tokens:
            return None
        loss = sum(part.loss for part in sums) / tokens
        record = {
            "held_out_loss": loss,
            "held_out_nats_per_byte": loss / self.data.bytes_per_token,
            "held_out_tokens": tokens,
        }
        self.recorder.evaluation({"step": step, **record})
        return record

    def _save(self, state: State, step: int) -> None:
        if self.backend.process != 0:
            return

        def write(directory: Path) -> None:
            self.backend.save(state, directory)

        self.checkpoints.save(step, write, self.facts)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
